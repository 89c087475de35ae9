// Next-token loss: the mean of -log softmax(logits)[label] over the tokens that count.
//
//   lse_t = log sum over v of exp(logits[t, v])
//   loss  = sum over t of mask_t (lse_t - logits[t, label_t]) / max(tokens, 1)
//   d_logits[t, v] = d_loss mask_t / max(tokens, 1) (softmax(logits[t])[v] - [v = label_t])
//
// where `tokens` is the sum over t of mask_t, or an input: the sum over more tokens than these, of
// which this loss is then only a part.
//
// with logits [T, V] of any float dtype, labels i32 [T], and mask [T] (weights, usually 0 or 1) of
// the logits' accumulation dtype. lse [T] and loss [1] have the accumulation dtype; the sums over
// tokens are kept in double, in a fixed order. A token whose mask is 0 contributes nothing,
// whatever its logits (even NaN) and label are, and its d_logits are zero; the label of any other
// token must lie in [0, V). mask and labels get no gradient, and none flows through lse.
//
// The vocabulary may be cut into parts: rank r of `parts` has logits of V_r consecutive ids, and
// labels counted from its first one, of which those of other parts lie outside of [0, V_r). Then
// the ranks exchange three numbers for each token and part (the largest logit, the sum of the
// exponentials of the differences from it, and the label's logit or 0), and each computes the loss
// of all parts, in the order of the parts, and the gradient of its own logits:
//
//   cross_entropy_part     (logits, labels)                       -> part [T, 3]
//   cross_entropy_of_parts (logits, labels, mask, parts, tokens?) -> loss [1], lse [T]
//
// with parts [parts T, 3] of all ranks, rank by rank, in the accumulation dtype.
//
// Kinds, besides these two
//   cross_entropy          (logits, labels, mask, tokens?)              -> loss [1], lse [T]
//   cross_entropy_gradient (logits, labels, mask, lse, d_loss, tokens?) -> d_logits, may overwrite
//                                                                          logits
// tokens [1] has the accumulation dtype, no gradient, and may be absent.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CrossEntropyResult {
  ValueId loss;  // [1]
  ValueId lse;   // [T]
};

struct CrossEntropyInputs {
  ValueId logits;  // [T, V]
  ValueId labels;  // [T]
  ValueId mask;    // [T]
  ValueId tokens;  // [1]; invalid: the sum of the mask
};

// Emits the loss of `logits`.
CrossEntropyResult cross_entropy(Builder& builder, const CrossEntropyInputs& inputs,
                                 const std::string& name);

// Emits what the other ranks must know of this part of the logits: [T, 3].
ValueId cross_entropy_part(Builder& builder, ValueId logits, ValueId labels,
                           const std::string& name);
// Emits the loss over all parts, given those of all ranks.
CrossEntropyResult cross_entropy_of_parts(Builder& builder, const CrossEntropyInputs& inputs,
                                          ValueId parts, const std::string& name);

extern const OpSpec kCrossEntropy;
extern const OpSpec kCrossEntropyPart;
extern const OpSpec kCrossEntropyOfParts;
extern const OpSpec kCrossEntropyGradient;

}  // namespace troupe
