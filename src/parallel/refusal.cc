#include "parallel/refusal.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace troupe {

std::vector<int64_t> nearest_divisors(int64_t number, int64_t value) {
  return nearest_values(value, number, [&](int64_t divisor) { return number % divisor == 0; });
}

std::vector<int64_t> nearest_multiples(int64_t unit, int64_t value) {
  const int64_t below = value / unit * unit;
  if (below == 0) return {unit};
  return {below, below + unit};
}

std::string text_of_values(const std::vector<int64_t>& values) {
  return fmt::format("{}", fmt::join(values, " or "));
}

}  // namespace troupe
