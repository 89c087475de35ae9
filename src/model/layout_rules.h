// How blocks refuse the layouts that cannot cut them: messages that name the flag, the rule and the
// nearest values that keep it. Each function throws a UserError (bad request); any thread.
#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <string>

#include "base/error.h"
#include "parallel/layout.h"

namespace troupe {

[[noreturn]] inline void refuse_size(const char* flag, int32_t size, const std::string& rule,
                                     const std::string& nearest) {
  throw_bad_request(fmt::format("{} {}: {}. Nearest: {}.", flag, size, rule, nearest));
}

// `size` ranks share `amount` of something.
inline void require_divisor(const char* flag, int32_t size, int64_t amount, const char* what) {
  if (amount % size == 0) return;
  refuse_size(flag, size, fmt::format("it must divide {}, {}", what, amount),
              nearest_divisors(amount, size));
}

}  // namespace troupe
