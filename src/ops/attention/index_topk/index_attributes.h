// The sizes of an indexer of keys, which the operations that compute its scores share
// (index_topk.h has the formula). Plain values; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/sparse_attention/key_positions.h"
#include "program/op_spec.h"

namespace troupe {

struct IndexAttributes {
  int32_t batch = 1;
  int32_t sequence = 1;  // rows of this rank in each sequence
  int32_t heads = 1;     // H
  int32_t head_dim = 1;  // d
  SequenceChunks chunks = {};

  KeyRows rows() const { return key_rows(batch, sequence, chunks); }
  // The factor of I.
  double scale() const;
};

// Blocks of a GPU that take one query after the other, each with a row of scores for all its keys.
uint32_t index_blocks(const IndexAttributes& attributes);

// For shape rules: checks q, k and w, the first inputs, and starts, which is input `starts`.
void check_index_inputs(const InferContext& context, const IndexAttributes& attributes, int starts);
// " heads=2 ...", for printing attributes.
std::string text_of(const IndexAttributes& attributes);

}  // namespace troupe
