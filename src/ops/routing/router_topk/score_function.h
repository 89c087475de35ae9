// How a router's logits become scores (router_topk.h has the formulas).
#pragma once

#include <cstdint>
#include <string_view>

namespace troupe {

enum class ScoreFunction : uint8_t { softmax, sigmoid, sqrtsoftplus };
std::string_view name_of(ScoreFunction function);

}  // namespace troupe
