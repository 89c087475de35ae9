// The scores of an indexer's query on the CPU (index_topk.h has the formula). Any thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/index_topk/index_attributes.h"
#include "ops/attention/sparse_attention/gathered_keys.h"
#include "ops/cpu/gemm.h"

namespace troupe {

// Keys whose products are taken at a time.
inline constexpr int64_t kIndexBlock = 128;

// One query with its weights, and room for a block of keys.
template <class T>
struct IndexQuery {
  using A = accumulation_t<T>;

  IndexQuery(const IndexAttributes& a, A* scratch)
      : attributes(a),
        rows(a.rows()),
        queries(scratch),
        keys(queries + int64_t{a.heads} * a.head_dim),
        dots(keys + kIndexBlock * a.head_dim),
        rest(dots + kIndexBlock * a.heads) {}

  static int64_t scratch_elements(const IndexAttributes& a) {
    return int64_t{a.heads} * a.head_dim + kIndexBlock * (int64_t{a.heads} + a.head_dim);
  }

  void load_query(const T* q, const A* w, int64_t query) {
    const int64_t width = int64_t{attributes.heads} * attributes.head_dim;
    load(q + query * width, queries, width);
    weights = w + query * attributes.heads;
    sequence = query / rows.rows;
  }

  // The products with the keys at positions [begin, begin + count), at most kIndexBlock of them:
  // dots [H, count].
  void load_block(const T* k, const KeyPositions& positions, int64_t begin, int64_t count) {
    const int64_t d = attributes.head_dim;
    gather_keys(k, d, rows, sequence, positions, begin, count, keys);
    gemm_tile<A>(false, true, attributes.heads, count, d, A(1), queries, d, keys, d, A(0), dots,
                 count);
  }

  // scores[i] of all positions.
  void score(const T* k, const KeyPositions& positions, A* scores) {
    const auto scale = static_cast<A>(attributes.scale());
    for (int64_t begin = 0; begin < positions.count; begin += kIndexBlock) {
      const int64_t count = std::min(kIndexBlock, positions.count - begin);
      load_block(k, positions, begin, count);
      A* of_block = scores + begin;
      std::fill(of_block, of_block + count, A(0));
      for (int64_t head = 0; head < attributes.heads; ++head) {
        const A weight = scale * weights[head];
        const A* of_head = dots + head * count;
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < count; ++i) {
          of_block[i] += weight * (of_head[i] > A(0) ? of_head[i] : A(0));
        }
      }
    }
  }

  const IndexAttributes& attributes;
  const KeyRows rows;
  A* const queries;  // [H, d]
  A* const keys;     // of a block, [count, d]
  A* const dots;     // of a block, [H, count]
  A* const rest;     // of the scratch memory
  const A* weights = nullptr;
  int64_t sequence = 0;
};

}  // namespace troupe
