// How yarn grows scores with the length of the context (ops/attention/rope/rope_frequencies.h): by
// 0.1 m ln(factor) + 1 in a context that is `factor` times as long, where that is longer (Peng et
// al., 2023, with DeepSeek's m). A pure function; any thread.
#pragma once

#include <cmath>

namespace troupe {

inline double length_factor(double factor, double m) {
  return factor <= 1 ? 1 : 0.1 * m * std::log(factor) + 1;
}

}  // namespace troupe
