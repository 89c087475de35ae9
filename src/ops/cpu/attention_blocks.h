// Attention of a block of queries to a block of keys of one head: the arithmetic that all kernels
// of causal attention share (ops/attention/attention/attention.h has the formulas). A block is a
// stretch of consecutive positions of a sequence; which keys a query sees depends on positions
// alone, so it does not matter where the rows of a block come from.
//
// Everything is in the accumulation type A. Memory is the caller's; any number of threads at once.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "ops/attention/attention/attention_mask.h"
#include "ops/cpu/dropout_mask.h"
#include "ops/cpu/exponentials.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/vector.h"

namespace troupe {

// Queries and keys of a block at most. Larger blocks make better products, smaller ones waste less
// work above the diagonal; a block of scores with its operands fits in the second-level cache.
inline constexpr int64_t kAttentionBlock = 128;

// The keys of a block that a query sees: [begin, end) of their numbers in it.
struct VisibleKeys {
  int64_t begin;
  int64_t end;
};
inline VisibleKeys visible_keys(const AttentionMask& mask, int64_t query,
                                const AttentionBlock& keys) {
  const int64_t begin = std::clamp<int64_t>(mask.first_key(query) - keys.first, 0, keys.count);
  return {begin, std::clamp<int64_t>(query + 1 - keys.first, begin, keys.count)};
}

// Which probabilities a call drops, if it drops any. Each thread has one of its own.
class AttentionDropout {
 public:
  // Without a `step` nothing is dropped. `sequence`: of the whole.
  AttentionDropout(uint64_t seed, uint32_t substream, double probability, int64_t sequence,
                   const int64_t* step)
      : sequence_(sequence), row_((sequence_ + 3) / 4 * 4) {
    if (step == nullptr) return;
    mask_.emplace(seed, substream, *step, probability);
  }

  bool active() const { return mask_.has_value(); }
  // The factor of the probabilities that are kept.
  double scale() const { return mask_.has_value() ? mask_->scale() : 1; }

  // Draws for the keys [first, first + count) of a query; `number` is b H + h.
  void draw(int64_t number, int64_t query, int64_t first, int64_t count) {
    const int64_t element = (number * sequence_ + query) * row_ + first;
    mask_->draw(static_cast<uint64_t>(element), count, words_.data());
  }

  // values[i] *= factor where key number i of those drawn is kept, = 0 elsewhere.
  template <class A>
  void apply(A factor, A* values, int64_t count) const {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      values[i] = mask_->keeps(words_[static_cast<size_t>(i)]) ? values[i] * factor : A(0);
    }
  }

 private:
  int64_t sequence_, row_;
  std::optional<DropoutMask> mask_;
  std::array<uint32_t, kAttentionBlock> words_{};
};

// Rows of one head: the operand itself, or its copy in the type of the sums.
template <class A>
struct AttentionRows {
  const A* data = nullptr;
  int64_t stride = 0;
};

// Takes what a copy needs, rows * columns elements, from `scratch`.
template <class T, class A>
AttentionRows<A> attention_rows(const T* source, int64_t stride, int64_t rows, int64_t columns,
                                A*& scratch) {
  if constexpr (std::is_same_v<T, A>) {
    return {source, stride};
  } else {
    A* copy = scratch;
    scratch += rows * columns;
    for (int64_t i = 0; i < rows; ++i) load(source + i * stride, copy + i * columns, columns);
    return {copy, columns};
  }
}

// What blocks of a call share. `number` names the sequence and head to the dropout.
template <class A>
struct AttentionHead {
  int64_t head_dim = 0;   // d
  int64_t value_dim = 0;  // e
  A scale = 1;
  AttentionMask mask;  // of the queries at hand
  int64_t number = 0;
};

// The running softmax of a block of queries: for each of them the largest score so far, the sum of
// the exponentials of the differences from it, and with these as weights the sum of the values.
template <class A>
struct RunningSoftmax {
  A* sums = nullptr;     // [queries, e]
  A* largest = nullptr;  // [queries]
  A* total = nullptr;    // [queries]

  void clear(int64_t queries) const {
    std::fill(largest, largest + queries, -std::numeric_limits<A>::infinity());
    std::fill(total, total + queries, A(0));
  }
};

// Adds the keys of a block, rescaling what was summed where the maximum grows. `first`: nothing was
// summed yet, and `sums` holds anything. `scores`: [queries, keys], temporary.
template <class A>
void attend_to_block(const AttentionHead<A>& head, AttentionDropout& dropout,
                     const AttentionBlock& queries, const AttentionRows<A>& q,
                     const AttentionBlock& keys, const AttentionRows<A>& k,
                     const AttentionRows<A>& v, bool first, A* scores,
                     const RunningSoftmax<A>& running) {
  const int64_t d = head.head_dim;
  const int64_t e = head.value_dim;
  gemm_tile<A>(false, true, queries.count, keys.count, d, head.scale, q.data, q.stride, k.data,
               k.stride, A(0), scores, keys.count);
  for (int64_t i = 0; i < queries.count; ++i) {
    const auto [begin, end] = visible_keys(head.mask, queries.first + i, keys);
    A* p = scores + i * keys.count;
    std::fill(p, p + begin, A(0));
    std::fill(p + end, p + keys.count, A(0));
    if (begin == end) continue;
    const A before = running.largest[i];
    const A now = std::max(before, max(p + begin, end - begin));
    scaled_exponentials(p + begin, end - begin, now, A(1), p + begin);
    const A grown = before == -std::numeric_limits<A>::infinity() ? A(0) : exp_fast(before - now);
    running.total[i] = running.total[i] * grown + sum(p + begin, end - begin);
    running.largest[i] = now;
    if (dropout.active()) {
      dropout.draw(head.number, queries.first + i, keys.first + begin, end - begin);
      dropout.apply(A(1), p + begin, end - begin);
    }
    if (!first && grown != A(1)) {
      A* to = running.sums + i * e;
      for (int64_t c = 0; c < e; ++c) to[c] *= grown;
    }
  }
  gemm_tile<A>(false, false, queries.count, e, keys.count, A(1), scores, keys.count, v.data,
               v.stride, first ? A(0) : A(1), running.sums, e);
}

// The outputs of a block of queries, after all keys; each sees at least one. The sums are used up.
template <class T>
void store_attention(const RunningSoftmax<accumulation_t<T>>& running, int64_t queries,
                     int64_t value_dim, accumulation_t<T> kept, T* out, int64_t out_stride,
                     accumulation_t<T>* lse, int64_t lse_stride, const accumulation_t<T>* sink) {
  using A = accumulation_t<T>;
  for (int64_t i = 0; i < queries; ++i) {
    A largest = running.largest[i];
    A total = running.total[i];
    A factor = kept / total;
    if (sink != nullptr) {
      const A of_keys = std::exp(std::min(running.largest[i] - *sink, A(0)));
      largest = std::max(running.largest[i], *sink);
      total = of_keys * running.total[i] + std::exp(*sink - largest);
      factor = kept * of_keys / total;
    }
    A* from = running.sums + i * value_dim;
    for (int64_t c = 0; c < value_dim; ++c) from[c] *= factor;
    store(from, out + i * out_stride, value_dim);
    lse[i * lse_stride] = largest + std::log(total);
  }
}

// What the gradient needs of a block of queries besides their rows.
template <class A>
struct AttentionQueryGradients {
  AttentionRows<A> d_out;
  const A* lse = nullptr;      // of query i: lse[i * stride]
  const A* out_dot = nullptr;  // d_out . out, of query i: out_dot[i * stride]
  int64_t stride = 0;
};

// Sums of gradients, [rows, d] or, of values, [rows, e]. Where `first` is true the sum holds
// anything yet.
template <class A>
struct AttentionGradientSums {
  A* dq = nullptr;
  A* dk = nullptr;
  A* dv = nullptr;
  bool first_of_queries = false;
  bool first_of_keys = false;
};

// Adds the gradients of a block of queries and a block of keys. `p` and `ds`: [queries, keys],
// temporary.
template <class A>
void attend_to_block_backward(const AttentionHead<A>& head, AttentionDropout& dropout,
                              const AttentionBlock& queries, const AttentionRows<A>& q,
                              const AttentionQueryGradients<A>& of_queries,
                              const AttentionBlock& keys, const AttentionRows<A>& k,
                              const AttentionRows<A>& v, A* p, A* ds,
                              const AttentionGradientSums<A>& sums) {
  const int64_t d = head.head_dim;
  const int64_t e = head.value_dim;
  const AttentionRows<A>& go = of_queries.d_out;
  const A kept = static_cast<A>(dropout.scale());
  gemm_tile<A>(false, true, queries.count, keys.count, d, head.scale, q.data, q.stride, k.data,
               k.stride, A(0), p, keys.count);
  gemm_tile<A>(false, true, queries.count, keys.count, e, A(1), go.data, go.stride, v.data,
               v.stride, A(0), ds, keys.count);
  for (int64_t i = 0; i < queries.count; ++i) {
    const auto [begin, end] = visible_keys(head.mask, queries.first + i, keys);
    const A shift = of_queries.lse[i * of_queries.stride];
    const A dot = of_queries.out_dot[i * of_queries.stride];
    A* p_row = p + i * keys.count;
    A* ds_row = ds + i * keys.count;
    std::fill(p_row, p_row + begin, A(0));
    std::fill(ds_row, ds_row + begin, A(0));
    if (dropout.active()) {
      dropout.draw(head.number, queries.first + i, keys.first + begin, end - begin);
      dropout.apply(kept, ds_row + begin, end - begin);
    }
    scaled_exponentials(p_row + begin, end - begin, shift, A(1), p_row + begin);
    TROUPE_INDEPENDENT
    for (int64_t j = begin; j < end; ++j) ds_row[j] = p_row[j] * (ds_row[j] - dot);
    if (dropout.active()) dropout.apply(kept, p_row + begin, end - begin);
    std::fill(p_row + end, p_row + keys.count, A(0));
    std::fill(ds_row + end, ds_row + keys.count, A(0));
  }
  const A of_keys = sums.first_of_keys ? A(0) : A(1);
  gemm_tile<A>(true, false, keys.count, e, queries.count, A(1), p, keys.count, go.data, go.stride,
               of_keys, sums.dv, e);
  gemm_tile<A>(true, false, keys.count, d, queries.count, head.scale, ds, keys.count, q.data,
               q.stride, of_keys, sums.dk, d);
  gemm_tile<A>(false, false, queries.count, d, keys.count, head.scale, ds, keys.count, k.data,
               k.stride, sums.first_of_queries ? A(0) : A(1), sums.dq, d);
}

// Rows of `row_elements` that one piece of the memory-bound loops handles, at about 16k elements.
inline int64_t attention_rows_per_piece(int64_t row_elements) {
  return std::max<int64_t>(1, 16384 / row_elements);
}

}  // namespace troupe
