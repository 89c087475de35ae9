// Scores of router logits, as the CPU kernels compute them. T is float or double.
#pragma once

#include <algorithm>
#include <cmath>

#include "ops/cpu/exponentials.h"
#include "ops/cpu/vector.h"
#include "ops/routing/router_topk/score_function.h"

namespace troupe {

// e[i] = exp(z[i] - max z) for one token's logits z; returns the largest logit.
template <class T>
inline T shifted_exponentials(const T* z, int64_t experts, T* e) {
  const T largest = max(z, experts);
  scaled_exponentials(z, experts, largest, T(1), e);
  return largest;
}

// sqrt(log(1 + e^z)), written so that e^z cannot overflow.
template <class T>
inline T sqrtsoftplus(T z) {
  return std::sqrt(std::max(z, T(0)) + std::log1p(exp_fast(-std::abs(z))));
}

// The derivatives by z of the scores s = sigmoid(z) and s = sqrtsoftplus(z). For z -> -infinity
// that of the second tends to exp(z / 2) / 2, so it is 0 where s is.
template <class T>
inline T sigmoid_slope(T s) {
  return s * (T(1) - s);
}
template <class T>
inline T sqrtsoftplus_slope(T z, T s) {
  return s > T(0) ? sigmoid(z) / (T(2) * s) : T(0);
}

}  // namespace troupe
