// What a program runs on. Plain values; any thread.
#pragma once

#include <cstdint>

namespace troupe {

enum class Device : uint8_t {
  cpu,
  cuda,  // one NVIDIA GPU; only in builds with TROUPE_WITH_CUDA
};

}  // namespace troupe
