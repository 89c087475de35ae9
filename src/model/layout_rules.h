// How blocks refuse the layouts that cannot cut them: with the rule and the nearest sizes that keep
// it. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <optional>
#include <string>
#include <vector>

#include "parallel/refusal.h"

namespace troupe {

inline Refusal refuse_size(Setting setting, int32_t size, const std::string& rule,
                           const std::vector<int64_t>& nearest) {
  return {.setting = setting,
          .message = {setting,
                      fmt::format(" {}: {}. Nearest: {}.", size, rule, text_of_values(nearest))},
          .nearest = nearest};
}

// `size` ranks share `amount` of something.
[[nodiscard]] inline std::optional<Refusal> require_divisor(Setting setting, int32_t size,
                                                            int64_t amount, const char* what) {
  if (amount % size == 0) return std::nullopt;
  return refuse_size(setting, size, fmt::format("it must divide {}, {}", what, amount),
                     nearest_divisors(amount, size));
}

}  // namespace troupe
