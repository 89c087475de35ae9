// What a program runs on. Plain values; any thread.
#pragma once

#include <cstdint>

namespace troupe {

enum class Device : uint8_t {
  cpu,
  cuda,  // one NVIDIA GPU; only in builds with TROUPE_WITH_CUDA
};

// What a GPU is, as far as kernels are chosen and their grids sized by it. By default an H100 or
// H200, which plans are made for where there is no GPU. That of a GPU: device_traits() in
// runtime/device_memory.h.
struct DeviceTraits {
  int32_t compute_capability = 90;  // ten times CUDA's: 90 is 9.0, Hopper
  int32_t multiprocessors = 132;

  int32_t major() const { return compute_capability / 10; }
  bool operator==(const DeviceTraits&) const = default;
};

}  // namespace troupe
