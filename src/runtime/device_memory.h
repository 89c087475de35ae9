// Memory of a GPU: one block for the whole life of its owner, and a count of what all blocks hold
// (see arena.h for that of the host).
//
// Construction may throw UserError: the machine has no GPU, or not that much memory. Copies wait
// until they are done, and throw UserError when the GPU has failed. In builds without CUDA nothing
// here may be called but has_cuda() and why_no_gpu(). Counting is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace troupe {

// Was the program built with CUDA? Says nothing of the machine.
bool has_cuda();

// Why no GPU can be used; empty when one can.
std::string why_no_gpu();

// Bytes that are free on the GPU now.
uint64_t available_device_bytes();

class DeviceMemory {
 public:
  DeviceMemory() = default;
  // Zero-initialised, aligned to 256 bytes. `purpose` appears in the error message.
  DeviceMemory(uint64_t bytes, const std::string& purpose);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }  // an address on the GPU
  uint64_t bytes() const { return bytes_; }

  // All of it, from or to as many bytes of the host.
  void copy_in(const std::byte* host) const;
  void copy_out(std::byte* host) const;

  static uint64_t peak_allocated_bytes();  // the largest sum that there was

 private:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace troupe
