// Activations (ops/elementwise/activation) that are quantised (ops/precision/quantize) as they are
// made: the numbers are those of one operation after the other, and the activation, or its
// gradient, is never stored in the dtype of x. It is rounded to that before it is quantised.
//
// Kinds (R rows, ragged when x is; codes as quantize gives them by its attributes)
//   quantize_activation (x, offsets optional, amax optional, weights optional, row_slot with
//                       weights) -> codes and scales of activation(x, weights, row_slot) [R, f]
//   quantize_activation_gradient (x, offsets optional, amax optional, dy [R, f], weights optional,
//                       row_slot with weights) -> codes and scales of d_x [R, columns of x], and
//                       with weights d_weights as activation_gradient gives it; on a GPU its sums
//                       have another order
//
// Not with `stores_input`, and not of rows that are gathered, or of the rule fp4.
//
// GPUs have a kernel for bf16 that reads x once: in rows of packs of 16 bytes, by scales that are
// given for whole matrices, or in blocks of 1 x 128 and 128 x 1, of which those of gated gradients
// have to lie within a half of a row.
// Everything else goes through memory of the run, one step after the other.
#pragma once

#include "ops/precision/quantize_activation/activation_steps.h"

namespace troupe {

// Whether GPUs have a kernel that reads x once and stores codes.
bool makes_activation_tiles(const OpView& op);

extern const OpSpec kQuantizeActivation;
extern const OpSpec kQuantizeActivationGradient;

}  // namespace troupe
