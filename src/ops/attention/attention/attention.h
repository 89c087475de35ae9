// Causal softmax attention with grouped queries.
//
// A row belongs to one token (rows are batch-major: row = b S + s). It has H query heads of d
// elements; and G key heads of d elements, then G value heads of e elements (mostly e = d; not in
// multi-latent attention). Both are operand views, columns of a tensor's rows: queries, keys and
// values are the columns of one fused projection, or queries have a tensor of their own. Query head
// h attends with group g = h / (H / G). For query i and key j of the same sequence, j is visible
// from i when j <= i, with a sliding window w > 0 also j > i - w, and with `starts` also
// j >= starts[i] (ops/attention/attention/attention_mask.h):
//
//   score[i, j] = scale q_i . k_j                    (j visible from i)
//   lse_i = log sum over j of exp(score[i, j]),  p[i, j] = exp(score[i, j] - lse_i)
//   out_i = sum over j of p[i, j] v_j
//
// and for the gradient, with D_i = dout_i . out_i and ds[i, j] = p[i, j] (dout_i . v_j - D_i):
//
//   dv_j = sum over i of p[i, j] dout_i
//   dq_i = scale sum over j of ds[i, j] k_j,   dk_j = scale sum over i of ds[i, j] q_i
//
// (dk and dv also sum over the query heads of the group).
//
// With a `probability` r of dropout, p is replaced by m[i, j] p[i, j] / (1 - r) in out and dv, and
// dout_i . v_j by m[i, j] dout_i . v_j / (1 - r) in ds. Whether m is 1 or 0 is a pure function of
// (seed, substream, the value of `step`, sequence in the batch, head, query, key): element
// ((b H + h) S + i) 4 ceil(S / 4) + j of ops/cpu/dropout_mask.h; h and H count all heads when these
// are some of them (all_heads). lse is that of the scores before dropout. Nothing is saved; the
// gradient draws the mask again.
//
// Scores are computed block by block, the softmax online (Milakov and Gimelshein 2018; Dao et al.,
// "FlashAttention", 2022), so that no memory grows with the square of S. Everything between the
// operands is in the accumulation type.
//
// q [B S, H d], kv [B S, G (d + e)] and out [B S, H e] have the compute dtype; lse [B S, H] has the
// accumulation dtype; step is i64 [1], present exactly when r > 0; starts is i32 [B S], the
// position in its sequence at which the document of each query begins. Nothing is ragged; no
// gradient flows through lse.
//
// Where q and kv are the same tensor, its rows are [B S, H d + G (d + e)], and so is the one
// gradient of both.
//
// With `sinks`, numbers in the accumulation dtype of which head h has number first_sink + h, each
// query also has the probability exp(sink - lse) for nothing, and lse counts the sink with the keys
// (ops/attention/attention_sinks/attention_sinks.h).
//
// Kinds
//   attention          (q, kv, step optional, starts optional, sinks optional)  -> out, lse
//   attention_gradient (d_out, q, kv, out, lse, step optional, starts optional)
//                                            -> d_q, d_kv; or -> d_qkv, where they are one tensor
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct AttentionAttributes {
  int32_t batch = 1;      // B
  int32_t sequence = 1;   // S
  int32_t heads = 1;      // H, a multiple of groups
  int32_t groups = 1;     // G
  int32_t head_dim = 1;   // d
  int32_t value_dim = 0;  // e; 0: d
  double scale = 1;       // usually 1 / sqrt(d)
  int32_t window = 0;     // 0: none
  // Of dropout:
  uint32_t substream = 0;  // names the place
  uint64_t seed = 0;
  double probability = 0;  // r, 0 <= r < 1
  // These heads are [first_head, first_head + H) of all_heads; 0: of themselves.
  int32_t first_head = 0;
  int32_t all_heads = 0;
  int32_t first_sink = 0;  // of the first head, among the sinks
  // Elements of a row before the first key head: 0, or those of the queries in the same row.
  int32_t key_column = 0;

  constexpr int32_t value_size() const { return value_dim == 0 ? head_dim : value_dim; }
  // Elements of a row: of all queries; of all keys and values; of the result.
  constexpr int64_t query_row() const { return int64_t{heads} * head_dim; }
  constexpr int64_t key_value_row() const { return int64_t{groups} * (head_dim + value_size()); }
  constexpr int64_t out_row() const { return int64_t{heads} * value_size(); }
  // Elements of a row of q, and of kv: the same row where both are one tensor.
  constexpr bool is_fused() const { return key_column > 0; }
  constexpr int64_t query_stride() const { return is_fused() ? key_stride() : query_row(); }
  constexpr int64_t key_stride() const { return key_column + key_value_row(); }
  // The same with keys and values in the rows of the queries.
  constexpr AttentionAttributes fused() const {
    AttentionAttributes attributes = *this;
    attributes.key_column = static_cast<int32_t>(query_row());
    return attributes;
  }
};

// b H + h of query head `head`, where H counts all heads: what names it to the dropout.
inline int64_t head_number(const AttentionAttributes& a, int64_t b, int64_t head) {
  return b * (a.all_heads == 0 ? a.heads : a.all_heads) + a.first_head + head;
}

// The sink of a head, where there are sinks.
template <class A>
const A* sink_of(const A* sinks, const AttentionAttributes& attributes, int64_t head) {
  return sinks == nullptr ? nullptr : sinks + attributes.first_sink + head;
}

// The heads that attend: those of queries are the first elements of a row of `queries`, those of
// keys and values a row of `keys`, or what follows the queries where both are the same tensor.
struct AttentionHeads {
  ValueId queries;
  ValueId keys;

  bool are_fused() const { return queries == keys; }
};

// What attention reads beside them; each may be invalid.
struct AttentionExtras {
  ValueId step = {};    // exactly when there is dropout
  ValueId starts = {};  // of the documents in each sequence
  ValueId sinks = {};   // of the heads
};

// Emits the attention and returns out [B S, H e]; lse is the operation's second output. Attributes
// need not say whether the heads are fused.
ValueId attention(Builder& builder, const AttentionHeads& heads, const AttentionExtras& extras,
                  const AttentionAttributes& attributes, const std::string& name);

extern const OpSpec kAttention;
extern const OpSpec kAttentionGradient;

}  // namespace troupe
