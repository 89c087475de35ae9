// Root-mean-square normalisation of one vector, its derivative, and the gradient of its gain: the
// arithmetic of the kernels of rms_norm, whose statistics qk_norm shares.
//
// For x of n elements of T with gain vector gamma:
//   rstd = 1 / sqrt(sum x_i^2 / n + epsilon)
//   y_i  = round(x_i rstd gamma_i), or round(x_i rstd (1 + gamma_i)) when zero-centred.
// gamma is kept in accumulation_t<T>: its elements lie near 1, where bf16 has steps of 2^-7, and
// their rounding errors would be the same for all tokens, so they would not average out. All
// arithmetic is in accumulation_t<T>. Pure functions, any thread; output and input may be the same
// range.
#pragma once

#include <cmath>

#include "ops/cpu/vector.h"

namespace troupe {

// rstd, given the sum of the squares of n elements.
template <class A>
inline A rms_reciprocal_of(A squares, int64_t n, double epsilon) {
  return A(1) / std::sqrt(squares / static_cast<A>(n) + static_cast<A>(epsilon));
}

// `x(i)` gives the elements in A.
template <class A, class Element>
inline A rms_reciprocal(const Element& x, int64_t n, double epsilon) {
  const A squares = lane_sum<A>(n, [&](int64_t i) {
    const A value = x(i);
    return value * value;
  });
  return rms_reciprocal_of(squares, n, epsilon);
}

template <class T, class Element>
inline void rms_scale(const Element& x, accumulation_t<T> rstd, const accumulation_t<T>* gamma,
                      bool zero_centered, T* y, int64_t n) {
  using A = accumulation_t<T>;
  const A offset = zero_centered ? A(1) : A(0);
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) y[i] = T(x(i) * rstd * (offset + gamma[i]));
}

// With g_i = dy_i gamma_i (or dy_i (1 + gamma_i)):
//   dx_i = base_i + rstd g_i - x_i rstd^3 / n sum_j g_j x_j
// where `base` (nullptr: zero) is a gradient that reached x on another path; rounded once.
template <class T>
inline void rms_gradient(const T* dy, const T* x, accumulation_t<T> rstd,
                         const accumulation_t<T>* gamma, bool zero_centered, const T* base, T* dx,
                         int64_t n) {
  using A = accumulation_t<T>;
  const A offset = zero_centered ? A(1) : A(0);
  const A projection =
      lane_sum<A>(n, [=](int64_t i) { return widen(dy[i]) * (offset + gamma[i]) * widen(x[i]); });
  const A along = rstd * rstd * rstd * projection / static_cast<A>(n);
  if (base != nullptr) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const A g = widen(dy[i]) * (offset + gamma[i]);
      dx[i] = T(widen(base[i]) + (rstd * g - along * widen(x[i])));
    }
  } else {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      const A g = widen(dy[i]) * (offset + gamma[i]);
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
