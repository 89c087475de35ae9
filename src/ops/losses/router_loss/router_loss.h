// What the kinds share that make one number of a router's logits: load_balancing_loss,
// router_z_loss, router_entropy, and the gradients of the first two. Each has the logits [T, E],
// f32 or f64 and not ragged, as its first input; a gradient has that of the loss, [1], as its last.
// Where padding does not count, the mask and the count of ValidTokens are two more inputs. Broken
// operands abort with the name of the `kind`.
//
// The loops of their kernels are in router_loss_cpu.h. Except for ValidTokens, all is private to
// these rooms.
#pragma once

#include <vector>

#include "program/derivative.h"
#include "program/op_spec.h"

namespace troupe {

// Which tokens count; without a mask all do. Padding is routed like any other token, but is in no
// loss and in no count, as with padding_mask in Megatron Core (there 1 is padding).
struct ValidTokens {
  ValueId mask = {};   // i32 [T]: 1 where the token counts, 0 where it is padding
  ValueId count = {};  // i32 [1]: how many count, of all ranks' tokens that the T are a part of
};

// The inputs of a loss: `inputs`, and where there is a mask that and the count.
std::vector<ValueId> router_loss_inputs(std::vector<ValueId> inputs, const ValidTokens& valid);
// The inputs of its gradient: those of the loss, and the loss's gradient.
std::vector<ValueId> router_loss_gradient_inputs(const DerivativeContext& context);

// Checks logits and mask and declares the result, [1] of the logits' dtype. `operands`: inputs
// without mask and count.
void infer_router_loss(InferContext& context, const char* kind, int operands);
// Checks logits, mask and the loss's gradient and declares the gradient of the logits.
void infer_router_loss_gradient(InferContext& context, const char* kind, int operands);

// `flops_per_logit` for each logit; each operand is read or written once.
Cost cost_router_loss(const OpView& op, double flops_per_logit);

// The sum of each chunk of tokens, for the kinds that declare a loss.
uint64_t router_loss_workspace_bytes(const OpView& op);
// The scores of one token.
uint64_t router_loss_scratch_bytes(const OpView& op);
// On a GPU: a term of the loss for each token.
uint64_t router_loss_cuda_scratch_bytes(const OpView& op);

}  // namespace troupe
