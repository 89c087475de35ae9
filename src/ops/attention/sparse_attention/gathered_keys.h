// What the CPU kernels of sparse attention and of its indexer do with the rows of keys: copies of
// those at some positions, and sums of their gradients, which several queries add to.
//
// Gradients are summed in pieces of consecutive queries, whose number depends on the sizes alone;
// each piece has sums of its own for all keys, which are then added in order. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/sparse_attention/key_positions.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {

// to[i] = the key at positions[begin + i] of sequence `b`, for i < count. `width`: of a row.
template <class T>
void gather_keys(const T* keys, int64_t width, const KeyRows& rows, int64_t b,
                 const KeyPositions& positions, int64_t begin, int64_t count,
                 accumulation_t<T>* to) {
  for (int64_t i = 0; i < count; ++i) {
    load(keys + rows.key(b, positions[begin + i]) * width, to + i * width, width);
  }
}

// Pieces of the queries that sum gradients of keys by themselves.
inline int64_t key_gradient_pieces(const KeyRows& rows) {
  return std::clamp<int64_t>(rows.queries() / 16, 1, 8);
}

inline uint64_t key_gradient_elements(const KeyRows& rows, int64_t width) {
  return static_cast<uint64_t>(key_gradient_pieces(rows) * rows.keys() * width);
}

// Calls add(query, sums [keys, width], worker) for every query, with the sums of its piece, then
// stores the sums of all pieces. `sums`: key_gradient_elements().
template <class T, class Add>
void sum_key_gradients(const KernelArguments& args, const KeyRows& rows, int64_t width,
                       accumulation_t<T>* sums, T* gradient, const Add& add) {
  const int64_t pieces = key_gradient_pieces(rows);
  const int64_t elements = rows.keys() * width;
  args.pool->parallel_for(pieces, [&](int64_t piece, int worker) {
    accumulation_t<T>* own = sums + piece * elements;
    std::fill(own, own + elements, accumulation_t<T>(0));
    const int64_t end = rows.queries() * (piece + 1) / pieces;
    for (int64_t query = rows.queries() * piece / pieces; query < end; ++query) {
      add(query, own, worker);
    }
  });
  args.pool->parallel_ranges(rows.keys(), row_grain(width), [&](int64_t begin, int64_t end, int) {
    for (int64_t piece = 1; piece < pieces; ++piece) {
      add_to(sums + piece * elements + begin * width, sums + begin * width, (end - begin) * width);
    }
    store(sums + begin * width, gradient + begin * width, (end - begin) * width);
  });
}

}  // namespace troupe
