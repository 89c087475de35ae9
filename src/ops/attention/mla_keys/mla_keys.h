// MLA keys: the rows of keys and values that attention reads, put together from the projections of
// multi-head latent attention (DeepSeek-V2, 2024, section 2.1). Its queries turn where they are
// (ops/attention/rope/rope.h).
//
// With H heads, n = plain_dim, r = rotary_dim and v = value_dim a token has
//   kv   [H (n + v)]   of each head: n elements of its key, then its value
//   k_r  [r]           the turning part of the key, one for all heads
// and its row is, all heads of one kind together,
//   row  [H (n + r + v)] = keys (k_n, turned k_r), values
// Turning is that of ops/attention/rope/rope.h with its table, row t at position t mod sequence: of
// the pair i < r / 2 of elements (a, b), with c and s of the table,
//   a' = a c - b s,  b' = b c + a s
// where the pair is (2 i, 2 i + 1) of the r elements if `interleaved`, else (i, i + r / 2).
// Arithmetic is in the accumulation type, rounded once.
//
// Kinds (T rows; not ragged)
//   mla_keys (kv, k_r, table in the accumulation dtype) -> row
//   mla_keys_gradient (d_row, table) -> d_kv, d_k_r: turned back; d_k_r is the sum over the heads,
//       in a fixed order
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct MlaKeysAttributes {
  int32_t heads = 0;
  int32_t plain_dim = 0;
  int32_t rotary_dim = 0;  // even
  int32_t value_dim = 0;
  int32_t sequence = 0;  // positions repeat after this many rows
  bool interleaved = false;

  constexpr int32_t key_dim() const { return plain_dim + rotary_dim; }
  constexpr int64_t key_size() const { return int64_t{heads} * key_dim(); }
  constexpr int64_t projected_size() const { return int64_t{heads} * (plain_dim + value_dim); }
  constexpr int64_t row_size() const { return key_size() + int64_t{heads} * value_dim; }
};

// Do the GPU's kernels move packs: where these never cross from one part of a row to another, nor
// from one half of the pairs.
bool moves_packs(const MlaKeysAttributes& attributes, DType dtype);

struct MlaKeysInputs {
  ValueId key_values;  // kv
  ValueId shared_key;  // k_r
  ValueId table;       // rope_table of rotary_dim, of at least `sequence` positions
};

ValueId mla_keys(Builder& builder, const MlaKeysInputs& inputs, const MlaKeysAttributes& attributes,
                 const std::string& name);

extern const OpSpec kMlaKeys;
extern const OpSpec kMlaKeysGradient;

}  // namespace troupe
