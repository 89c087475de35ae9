// Attention target: how much each key of a query gets of the attention of all heads together, which
// an indexer learns to foresee (DeepSeek-V3.2, 2025, section 2.1.1).
//
//   target[t, i] = sum over heads h of p_h[i],  p_h = softmax over i of scale q_h . k_i
// over the keys i that were chosen for query t, or over all that it sees. Operands are those of
// ops/attention/sparse_attention/sparse_attention.h.
//
// Kinds (n ranks share each sequence of n S positions)
//   attention_target (q [T, H d], k [n T, d], chosen i32 [T, K] optional, starts i32 [T] optional)
//       -> target in the accumulation dtype: [T, K] by choice, or without one [T, n S] by position;
//          0 where there is no key
// `starts` only without a choice. No gradient flows through it.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/sparse_attention/sparse_attention.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `attributes`: value_dim has no meaning.
ValueId attention_target(Builder& builder, ValueId q, ValueId k, ValueId chosen, ValueId starts,
                         const SparseAttentionAttributes& attributes, const std::string& name);

extern const OpSpec kAttentionTarget;

}  // namespace troupe
