// Index top-k: the keys that sparse attention reads, chosen by an indexer (the lightning indexer of
// DeepSeek-V3.2, 2025, section 2.1).
//
// The indexer has H query heads of d elements, one key head, and a weight w for each query head. Of
// query t and a key s that it sees (ops/attention/sparse_attention/key_positions.h)
//   I[t, s] = H^-1/2 d^-1/2 sum over heads j of w[t, j] max(q[t, j] . k[s], 0)
// in the accumulation type. The K keys with the largest I are chosen, of equal ones those at lower
// positions; all keys where the query sees no more than K. (A rotation of queries and keys by one
// orthogonal matrix, such as Hadamard's, changes no I, and is left out.)
//
// Kinds (T = batch * sequence rows; n ranks share each sequence)
//   index_topk (q [T, H d], k [n T, d], w [T, H] in the accumulation dtype,
//               starts i32 [T] optional) -> chosen i32 [T, K]: positions, ascending, then -1
// with K = min(top_k, n sequence). Nothing is ragged, nothing differentiated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/attention/index_topk/index_attributes.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct IndexTopkAttributes {
  IndexAttributes index;
  int32_t top_k = 1;

  int64_t most() const { return std::min<int64_t>(top_k, index.rows().sequence()); }
};

// What an indexer makes of the tokens.
struct IndexInputs {
  ValueId queries;
  ValueId keys;
  ValueId weights;
  ValueId starts = {};  // or invalid
};

// Returns `chosen`.
ValueId index_topk(Builder& builder, const IndexInputs& inputs,
                   const IndexTopkAttributes& attributes, const std::string& name);

extern const OpSpec kIndexTopk;

}  // namespace troupe
