// The refusal of a flag that says nothing without another one.
#pragma once

#include <fmt/format.h>
#include <string_view>

#include "base/error.h"

namespace troupe {

inline void refuse_without(bool given, std::string_view flag, std::string_view needed) {
  if (!given) return;
  throw_bad_request(
      fmt::format("--{}: it belongs to --{}. Add that, or leave the flag out.", flag, needed));
}

}  // namespace troupe
