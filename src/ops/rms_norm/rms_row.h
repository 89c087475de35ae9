// Root-mean-square normalisation of one vector, its derivative, and the sum of a gain's gradient
// over many vectors: the arithmetic shared by the kernels of rms_norm and qk_norm.
//
// For x of n elements of T with gain vector gamma:
//   rstd = 1 / sqrt(sum x_i^2 / n + epsilon)
//   y_i  = round(round(x_i rstd) gamma_i), or round(x_i rstd (1 + gamma_i)) when zero-centred.
// The rounding to T before the gain is that of Hugging Face's Llama and Qwen norms; the
// zero-centred form rounds once, as Qwen3-Next's does. All arithmetic is in accumulation_t<T>. Pure
// functions, any thread; output and input may be the same range.
#pragma once

#include <algorithm>
#include <cmath>

#include "base/thread_pool.h"
#include "ops/cpu/vector.h"

namespace troupe {

template <class T>
inline accumulation_t<T> rms_reciprocal(const T* x, int64_t n, double epsilon) {
  using A = accumulation_t<T>;
  return A(1) / std::sqrt(sum_of_squares(x, n) / static_cast<A>(n) + static_cast<A>(epsilon));
}

template <class T>
inline void rms_scale(const T* x, accumulation_t<T> rstd, const T* gamma, bool zero_centered, T* y,
                      int64_t n) {
  if (zero_centered) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      y[i] = T(widen(x[i]) * rstd * (accumulation_t<T>(1) + widen(gamma[i])));
    }
  } else {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) y[i] = T(round_to<T>(widen(x[i]) * rstd) * widen(gamma[i]));
  }
}

// With g_i = dy_i gamma_i (or dy_i (1 + gamma_i)):
//   dx_i = base_i + rstd g_i - x_i rstd^3 / n sum_j g_j x_j
// where `base` (nullptr: zero) is a gradient that reached x on another path; rounded once.
template <class T>
inline void rms_gradient(const T* dy, const T* x, accumulation_t<T> rstd, const T* gamma,
                         bool zero_centered, const T* base, T* dx, int64_t n) {
  using A = accumulation_t<T>;
  const A offset = zero_centered ? A(1) : A(0);
  const A projection = lane_sum<A>(
      n, [=](int64_t i) { return widen(dy[i]) * (offset + widen(gamma[i])) * widen(x[i]); });
  const A along = rstd * rstd * rstd * projection / static_cast<A>(n);
  if (base != nullptr) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const A g = widen(dy[i]) * (offset + widen(gamma[i]));
      dx[i] = T(widen(base[i]) + (rstd * g - along * widen(x[i])));
    }
  } else {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const A g = widen(dy[i]) * (offset + widen(gamma[i]));
      dx[i] = T(rstd * g - along * widen(x[i]));
    }
  }
}

// d_gamma_i += dy_i x_i rstd
template <class T>
inline void rms_add_gain_gradient(const T* dy, const T* x, accumulation_t<T> rstd,
                                  accumulation_t<T>* d_gamma, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d_gamma[i] += widen(dy[i]) * widen(x[i]) * rstd;
}

// How a sum over `rows` rows is cut into pieces that are summed apart and then added in order: by
// the sizes alone, at least some 32 k elements and at most 32 pieces.
struct RmsPieces {
  int64_t rows = 0;  // of one piece; the last may have fewer
  int64_t count = 0;
};
inline RmsPieces rms_pieces(int64_t rows, int64_t row_elements) {
  const int64_t least = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, row_elements));
  const int64_t piece = std::max(least, (rows + 31) / 32);
  return {.rows = piece, .count = (rows + piece - 1) / piece};
}

// Sums add_row(row, partial) over the rows below `live`, where `partial` (n elements) collects what
// the rows of one piece add, and writes the sum to `out` or adds it to what is there. `workspace`
// holds pieces.count * n elements.
template <class A, class AddRow>
inline void rms_sum_rows(ThreadPool& pool, const RmsPieces& pieces, int64_t live, int64_t n,
                         A* workspace, bool accumulate, A* out, const AddRow& add_row) {
  pool.parallel_for(pieces.count, [&](int64_t piece, int) {
    A* partial = workspace + piece * n;
    std::fill_n(partial, n, A(0));
    const int64_t end = std::min(live, (piece + 1) * pieces.rows);
    for (int64_t row = piece * pieces.rows; row < end; ++row) add_row(row, partial);
  });
  if (!accumulate) std::fill_n(out, n, A(0));
  for (int64_t piece = 0; piece < pieces.count; ++piece) add_to(workspace + piece * n, out, n);
}

}  // namespace troupe
