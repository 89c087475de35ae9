// Where `ends` has what, for the kernels on CPU and GPU. Pure functions. Private to this folder.
#pragma once

#include <cstdint>

#include "base/shape.h"
#include "program/row_origin.h"

namespace troupe {

struct DeltaEndsShape {
  SequenceChunks chunks;
  int64_t sequences = 0;
  int64_t heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;

  DeltaEndsShape(const SequenceChunks& chunks, const Shape& ends)
      : chunks(chunks),
        sequences(ends[0] / (2 * chunks.ranks)),
        heads(ends[1]),
        key_dim(ends[2]),
        value_dim(ends[3] - ends[2]) {}

  constexpr int64_t count() const { return 2 * int64_t{chunks.ranks}; }  // chunks of a sequence
  constexpr int64_t columns() const { return value_dim + key_dim; }      // of a row of Q beside P
  constexpr int64_t state_size() const { return key_dim * value_dim; }
  // The later of the rank's own chunks.
  constexpr int64_t last() const { return count() - 1 - chunks.rank; }
  // Where Q of a chunk begins; its P is value_dim further.
  constexpr int64_t end_of(int64_t sequence, int64_t head, int64_t chunk) const {
    const int64_t row =
        (chunks.owner(chunk) * sequences + sequence) * 2 + (chunk < chunks.ranks ? 0 : 1);
    return (row * heads + head) * key_dim * columns();
  }
  // Where the state before a chunk begins, of this rank's; -1 of others.
  constexpr int64_t state_of(int64_t sequence, int64_t head, int64_t chunk) const {
    if (chunks.owner(chunk) != chunks.rank) return -1;
    return ((sequence * 2 + (chunk < chunks.ranks ? 0 : 1)) * heads + head) * state_size();
  }
};

}  // namespace troupe
