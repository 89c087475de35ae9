// Index loss: how far an indexer's scores are from the attention that they should foresee
// (DeepSeek-V3.2, 2025, section 2.1.1; Megatron Core: dsa_indexer_loss.py).
//
// With the scores I[t, s] of ops/attention/index_topk/index_topk.h over the keys that were chosen
// for query t, or all that it sees, the target of ops/attention/attention_target over the same
// keys, and e = 1e-10
//   p_t = softmax over s of I[t, s],   g_t = target_t / max(sum over s of target[t, s], e)
//   loss = c mean over queries t of sum over s of g[t, s] (log max(g[t, s], e) - log p[t, s])
//   dI[t, s] = d_loss c / T (p[t, s] - g[t, s])
// in the accumulation type. Only what the scores are made of has a gradient. Without a target the
// loss is 0, and so are the gradients: of an indexer that is not trained.
//
// Kinds (shapes as of index_topk; the target [T, K] with a choice, else [T, positions])
//   index_loss (q, k, w, target optional, chosen optional, starts optional) -> loss [1] in the
//       accumulation dtype
//   index_loss_gradient (the same, d_loss [1]) -> d_q, d_k, d_w
#pragma once

#include <string>

#include "ops/attention/index_topk/index_topk.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct IndexLossAttributes {
  IndexAttributes index;
  double coefficient = 0;  // c
};

// The epsilon of the target's sum and of its logarithm.
inline constexpr double kIndexLossEpsilon = 1e-10;

ValueId index_loss(Builder& builder, const IndexInputs& inputs, ValueId target, ValueId chosen,
                   const IndexLossAttributes& attributes, const std::string& name);

extern const OpSpec kIndexLoss;
extern const OpSpec kIndexLossGradient;

}  // namespace troupe
