// Attention of each query to keys that were chosen for it, with one key head for all query heads
// whose first elements are the values: multi-head latent attention in the space of its latent
// (DeepSeek-V2, 2024, section 2.1.2; DeepSeek-V3.2, 2025, section 2.1).
//
// A query row holds H heads of d elements, a key row d elements, of which the first e are the
// value. With the keys j chosen for query i (key_positions.h), of each head
//   score[j] = scale q_i . k_j,  lse_i = log sum over j of exp(score[j])
//   out_i    = sum over j of p[j] v_j,  p[j] = exp(score[j] - lse_i)
// and for the gradient, with D_i = dout_i . out_i and ds[j] = p[j] (dout_i . v_j - D_i)
//   dq_i = scale sum over j of ds[j] k_j
//   dk_j = sum over the queries that have j, and their heads, of scale ds[j] q_i and, in the first
//   e
//          elements, p[j] dout_i
// Each query has one key at least. The choice itself is not differentiated. Everything between the
// operands is in the accumulation type.
//
// q [T, H d], k [n T, d] and out [T, H e] have the compute dtype, lse [T, H] its accumulation
// dtype; chosen is i32 [T, K]; n ranks share each sequence. Nothing is ragged; no gradient flows
// through lse.
//
// Kinds
//   sparse_attention          (q, k, chosen)                  -> out, lse
//   sparse_attention_gradient (d_out, q, k, chosen, out, lse) -> d_q, d_k
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/sparse_attention/key_positions.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct SparseAttentionAttributes {
  int32_t batch = 1;
  int32_t sequence = 1;   // rows of this rank in each sequence
  int32_t heads = 1;      // H
  int32_t key_dim = 1;    // d
  int32_t value_dim = 1;  // e
  double scale = 1;
  SequenceChunks chunks = {};

  KeyRows rows() const { return key_rows(batch, sequence, chunks); }
};

ValueId sparse_attention(Builder& builder, ValueId q, ValueId k, ValueId chosen,
                         const SparseAttentionAttributes& attributes, const std::string& name);

extern const OpSpec kSparseAttention;
extern const OpSpec kSparseAttentionGradient;

}  // namespace troupe
