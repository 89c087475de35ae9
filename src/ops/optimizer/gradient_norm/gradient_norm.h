// Gradient norm and clipping, in two operations so that the squares can be summed over ranks
// between them:
//   squared_norm       the sum of the squares of gradients, in double, in a fixed order; or how
//   many
//                      of their elements are 0;
//   clip_coefficient   norm = sqrt(squared norm) / loss scale
//                      coefficient = min(1, max_norm / (norm + 1e-6)) / loss scale
//                      skip = 1 when the norm is not finite, or above skip_norm, or where what
//                      else makes the step void is not 0.
// Gradients hold the loss scale (ops/losses/loss_scale) as a factor; without one it is 1.
// The optimizer multiplies gradients by the coefficient and does nothing when skip is set; both
// stay on the device. Neither has a derivative. (Formula: torch.nn.utils.clip_grad_norm_, Megatron
// Core.)
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/shard.h"

namespace troupe {

// What is summed over the elements: their squares, or 1 for each that is 0.
enum class NormTerm : uint8_t { square, zero };

struct SquaredNormAttributes {
  int64_t rows = 0;  // only the first rows of each gradient count; 0: all
  Shard shard = {};  // and of them only elements of this shard of the gradient
  NormTerm term = NormTerm::square;
};

// `gradients`: n >= 1 tensors of any shape, each f32, f64 or bf16, not ragged. Returns f64 [1]: the
// sum over the gradients, in their order, of the sums of their squares (or of the other term).
ValueId squared_norm(Builder& builder, std::span<const ValueId> gradients,
                     const SquaredNormAttributes& attributes, const std::string& name);

// Inputs: the gradients. Output: f64 [1].
extern const OpSpec kSquaredNorm;

struct ClipAttributes {
  double max_norm = 0;  // 0 or less: gradients are not clipped
  double skip_norm = std::numeric_limits<double>::infinity();
};

struct ClipResult {
  ValueId norm;         // f64 [1], a metric: the norm before clipping
  ValueId coefficient;  // f64 [1]; clips nothing when the norm is not finite
  ValueId skip;         // i32 [1], a metric
};

// `squared_norm`: f64 [1]; `faults`: f64 [1], or invalid: not 0 where the gradients are void;
// `loss_scale`: f64 [1], or invalid: 1.
// Results are named `name`, name.coefficient and name.skip.
ClipResult clip_coefficient(Builder& builder, ValueId squared_norm,
                            const ClipAttributes& attributes, const std::string& name,
                            ValueId faults = {}, ValueId loss_scale = {});

// Inputs: squared norm, faults, loss scale; of the last two each may be absent. Outputs: norm,
// coefficient, skip.
extern const OpSpec kClipCoefficient;

}  // namespace troupe
