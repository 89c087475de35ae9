// What the kinds share that make one number of a router's logits: load_balancing_loss,
// router_z_loss, router_entropy, and the gradients of the first two. Each has the logits [T, E],
// f32 or f64 and not ragged, as its first input; a gradient has that of the loss, [1], as its last.
// Broken operands abort with the name of the `kind`.
//
// The loops of their kernels are in router_loss_cpu.h. Private to these rooms.
#pragma once

#include "program/op_spec.h"

namespace troupe {

// Checks the logits and declares the result, [1] of their dtype.
void infer_router_loss(InferContext& context, const char* kind);
// Checks the logits and the loss's gradient and declares the gradient of the logits.
void infer_router_loss_gradient(InferContext& context, const char* kind);

// `flops_per_logit` for each logit; each operand is read or written once.
Cost cost_router_loss(const OpView& op, double flops_per_logit);

// The sum of each chunk of tokens, for the kinds that declare a loss.
uint64_t router_loss_workspace_bytes(const OpView& op);
// The scores of one token.
uint64_t router_loss_scratch_bytes(const OpView& op);

}  // namespace troupe
