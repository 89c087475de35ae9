// Root-mean-square normalisation of one vector, its derivative, and the gradient of its gain: the
// arithmetic shared by the kernels of rms_norm and qk_norm.
//
// For x of n elements of T with gain vector gamma:
//   rstd = 1 / sqrt(sum x_i^2 / n + epsilon)
//   y_i  = round(round(x_i rstd) gamma_i), or round(x_i rstd (1 + gamma_i)) when zero-centred.
// The rounding to T before the gain is that of Hugging Face's Llama and Qwen norms; the
// zero-centred form rounds once, as Qwen3-Next's does. All arithmetic is in accumulation_t<T>. Pure
// functions, any thread; output and input may be the same range.
#pragma once

#include <cmath>

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

}  // namespace troupe
