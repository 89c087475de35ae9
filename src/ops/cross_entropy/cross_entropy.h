// Next-token loss: the mean of -log softmax(logits)[label] over the tokens that count.
//
//   lse_t = log sum over v of exp(logits[t, v])
//   loss  = sum over t of mask_t (lse_t - logits[t, label_t]) / max(sum over t of mask_t, 1)
//   d_logits[t, v] = d_loss mask_t / max(sum mask, 1) (softmax(logits[t])[v] - [v = label_t])
//
// with logits [T, V] of any float dtype, labels i32 [T], and mask [T] (weights, usually 0 or 1) of
// the logits' accumulation dtype. lse [T] and loss [1] have the accumulation dtype; the sums over
// tokens are kept in double, in a fixed order. A token whose mask is 0 contributes nothing,
// whatever its logits (even NaN) and label are, and its d_logits are zero; the label of any other
// token must lie in [0, V). mask and labels get no gradient, and none flows through lse.
//
// Kinds
//   cross_entropy          (logits, labels, mask)              -> loss [1], lse [T]
//   cross_entropy_gradient (logits, labels, mask, lse, d_loss) -> d_logits, may overwrite logits
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CrossEntropyResult {
  ValueId loss;  // [1]
  ValueId lse;   // [T]
};

// Emits the loss of `logits` [T, V].
CrossEntropyResult cross_entropy(Builder& builder, ValueId logits, ValueId labels, ValueId mask,
                                 const std::string& name);

extern const OpSpec kCrossEntropy;
extern const OpSpec kCrossEntropyGradient;

}  // namespace troupe
