// Attention of the queries of one rank to the keys and values of all ranks that share each
// sequence.
//
// The formulas, the order of heads and the dropout are those of
// ops/attention/attention/attention.h; S is then the whole sequence, of which this rank has the
// rows S / n that program/row_origin.h gives it. A row of q holds the query heads of a token, a row
// of kv its key heads and then its value heads. What a query sees is decided by positions.
//
// Two forms, which give the same bits in out and lse:
//   context_attention  kv are the rows of all ranks, one rank's after the other's
//   ring_attention     kv are this rank's own; a collective, in which all ranks' keys and values
//                      pass round a ring, each rank having one other rank's at a time; their
//                      gradients go round with them and arrive at home
// (Liu, Zaharia and Abbeel, "Ring attention", 2023.) Rank r takes its own keys first, then those of
// rank r - 1, r - 2, ... round the ring, each source after the other with the online softmax of
// attention. Gradients of a source's keys are summed from the source on up the ring, in the
// accumulation dtype, and rounded once by ring_attention; context_attention rounds this rank's part
// of them. (So on CPUs. On a GPU keys and values are first copied to the order of their positions,
// and each chunk of queries attends to those before it as in attention; the sums are the same.)
//
// Kinds (T = B S / n)
//   context_attention (q [T, H d], kv [n T, G (d + e)], step optional, starts optional,
//                      sinks optional)                          -> out [T, H e], lse [T, H]
//   context_attention_gradient (d_out, q, kv, out, lse, step optional, starts optional)
//                                                               -> d_q, d_kv
//   ring_attention (q [T, H d], kv [T, G (d + e)], step optional, starts optional,
//                   sinks optional)                             -> out [T, H e], lse [T, H]
//   ring_attention_gradient (d_out, q, kv, out, lse, step optional, starts optional)
//                                                               -> d_q, d_kv
// Dtypes as of attention; starts is i32 [T], of the rows of q, as positions in the whole sequence.
// No gradient flows through lse.
#pragma once

#include <string>

#include "ops/attention/attention/attention.h"
#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct ContextAttentionAttributes {
  AttentionAttributes attention;  // its sequence is S / n
  SequenceChunks chunks = {};     // n and the rank, of RankGroup::cp
};

// Emit the attention and return out. Queries have a tensor of their own.
ValueId context_attention(Builder& builder, const AttentionHeads& heads,
                          const AttentionExtras& extras,
                          const ContextAttentionAttributes& attributes, const std::string& name);
ValueId ring_attention(Builder& builder, const AttentionHeads& heads, const AttentionExtras& extras,
                       const ContextAttentionAttributes& attributes, const std::string& name);

extern const OpSpec kContextAttention;
extern const OpSpec kContextAttentionGradient;
extern const OpSpec kRingAttention;
extern const OpSpec kRingAttentionGradient;

}  // namespace troupe
