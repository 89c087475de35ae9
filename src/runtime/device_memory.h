// Memory of a GPU: one block for the whole life of its owner, and a count of what all blocks hold
// on all GPUs (see arena.h for that of the host).
//
// Construction may throw UserError: the machine has no GPU, or not that much memory. Copies wait
// until they are done, and throw UserError when the GPU has failed. In builds without CUDA nothing
// here may be called but has_cuda(), why_no_gpu(), require_gpu(), gpu_count() and planned_traits().
// Counting is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/device.h"

namespace troupe {

// Was the program built with CUDA? Says nothing of the machine.
bool has_cuda();

// Why no GPU can be used; empty when one can.
std::string why_no_gpu();

// Refuses --device cuda: as a bad request where no GPU can be used, as a failure where one of
// CUDA's libraries must not be used (cuda_libraries.h).
void require_gpu();

// How many GPUs this process sees; 0 in builds without CUDA.
int gpu_count();

// What the calling thread does from here on is done on that GPU.
void use_gpu(int gpu);

// Tells GPUs apart also between processes, which may see different ones and number them from 0:
// CUDA's UUID, hashed.
uint64_t gpu_identity(int gpu);

// What its kernels are chosen by.
DeviceTraits device_traits(int gpu);

// For plans: those of a rank's GPU, or, of another device, the default ones.
DeviceTraits traits_of(Device device, int gpu);
// For plans of what may run elsewhere: those of the first GPU, or the default ones without one.
DeviceTraits planned_traits();

// Bytes that are free on a GPU now.
uint64_t available_device_bytes(int gpu = 0);
// Bytes that a GPU has.
uint64_t total_device_bytes(int gpu = 0);

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Zero-initialised, aligned to 256 bytes. `purpose` appears in the error message.
  DeviceMemory(uint64_t bytes, const std::string& purpose, int gpu = 0);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }  // an address on the GPU
  uint64_t bytes() const { return bytes_; }
  int gpu() const { return gpu_; }

  // `bytes` of it from `begin` on, from or to the host.
  void copy_in(const std::byte* host, uint64_t begin, uint64_t bytes) const;
  void copy_out(std::byte* host, uint64_t begin, uint64_t bytes) const;

  static uint64_t peak_allocated_bytes();  // the largest sum that there was

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  int gpu_ = 0;
};

}  // namespace troupe
