// The k largest of a few scores, for CPU kernels: float or double scores, in descending order, of
// equals the one with the lower index first. NaN counts as -infinity; the indices are k distinct
// ones whatever the scores are. Writes its output ranges only; may be called from any thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

namespace troupe {

// Scores are searched in blocks of this many.
inline constexpr int64_t kTopkBlock = 16;

inline int64_t topk_blocks(int64_t n) {
  return (n + kTopkBlock - 1) / kTopkBlock;
}

// The room that select_largest needs for n scores or fewer: the scores in whole blocks, and the
// largest of each block.
inline int64_t topk_search_elements(int64_t n) {
  return topk_blocks(n) * (kTopkBlock + 1);
}

// b when a is NaN.
template <class T>
T larger_score(T a, T b) {
  return a > b ? a : b;
}

// -infinity when the score is NaN.
template <class T>
T score_or_none(T score) {
  return larger_score(score, -std::numeric_limits<T>::infinity());
}

// The largest of n = 2, 4, 8, ... numbers, pairwise: a chain of log2(n) comparisons.
template <int64_t n, class T>
[[gnu::always_inline]] inline T largest_score(const T* x) {
  if constexpr (n == 1) {
    return x[0];
  } else {
    return larger_score(largest_score<n / 2>(x), largest_score<n / 2>(x + n / 2));
  }
}

// Fills index[top_k], top_k <= n, from scores[n]; `work` is room for topk_search_elements(n)
// scores.
//
// Takes the largest score k times. Searching the blocks' maxima and then one block has no branch
// that depends on the data; insertion into a sorted list does, and takes several times as long.
template <class T>
void select_largest(const T* scores, int64_t n, int64_t top_k, T* work, int32_t* index) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  const int64_t blocks = topk_blocks(n);
  T* maxima = work + blocks * kTopkBlock;
  for (int64_t i = 0; i < n; ++i) work[i] = score_or_none(scores[i]);
  std::fill(work + n, maxima, kNone);
  for (int64_t block = 0; block < blocks; ++block) {
    maxima[block] = largest_score<kTopkBlock>(work + block * kTopkBlock);
  }
  for (int64_t slot = 0; slot < top_k; ++slot) {
    int64_t block = 0;
    T value = maxima[0];
    for (int64_t b = 1; b < blocks; ++b) {
      block = maxima[b] > value ? b : block;
      value = maxima[b] > value ? maxima[b] : value;
    }
    int64_t found = 0;
    if (value > kNone) [[likely]] {
      T* left = work + block * kTopkBlock;
      uint32_t equal = 0;
      for (int i = 0; i < kTopkBlock; ++i) equal |= static_cast<uint32_t>(left[i] >= value) << i;
      const int lane = std::countr_zero(equal);
      found = block * kTopkBlock + lane;
      left[lane] = kNone;
      maxima[block] = largest_score<kTopkBlock>(left);
    } else {
      // Only -infinity and NaN are left: the first that has not been taken.
      while (std::find(index, index + slot, found) != index + slot) ++found;
    }
    index[slot] = static_cast<int32_t>(found);
  }
}

}  // namespace troupe
