// How far what was computed lies from its reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace troupe::testing {

inline double l2_norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// L2 norm of the difference over that of the reference (or 1e-3 where that is tiny). NaN in one of
// them and not in the other, or another number of elements, is infinitely far.
inline double distance(const std::vector<double>& actual, const std::vector<double>& reference) {
  if (actual.size() != reference.size()) return INFINITY;
  std::vector<double> difference;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) != std::isnan(reference[i])) return INFINITY;
    // Both infinite, or both NaN, is no difference.
    const bool same = actual[i] == reference[i] || std::isnan(actual[i]);
    difference.push_back(same ? 0.0 : actual[i] - reference[i]);
  }
  std::vector<double> finite = reference;
  for (double& value : finite) value = std::isfinite(value) ? value : 0.0;
  return l2_norm(difference) / std::max(l2_norm(finite), 1e-3);
}

}  // namespace troupe::testing
