// The chunks in which the CPU kernel of dispatch_plan counts tokens: shared by the kernel and by
// the rule that books its workspace. Private to this folder.
#pragma once

#include <cstdint>

namespace troupe {

inline constexpr int64_t kPlanChunkTokens = 4096;

inline int64_t plan_chunks(int64_t tokens) {
  return (tokens + kPlanChunkTokens - 1) / kPlanChunkTokens;
}

}  // namespace troupe
