#include "runtime/host_memory.h"

#include "base/error.h"

#ifdef TROUPE_WITH_CUDA
#include <cstring>
#include <cuda_runtime.h>

#include "base/units.h"
#include "program/cuda/check.h"
#endif

namespace troupe {
namespace {

std::byte* pin(uint64_t bytes, const std::string& purpose) {
#ifdef TROUPE_WITH_CUDA
  void* memory = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the failure is not remembered
    throw UserError(ExitStatus::does_not_fit, "This machine refuses to pin " + format_bytes(bytes) +
                                                  " for " + purpose + ". Offload less.");
  }
  check_cuda(error, "pinning memory of the host");
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
#else
  TROUPE_CHECK(false, "this build has no CUDA: " + std::to_string(bytes) + " for " + purpose);
  return nullptr;
#endif
}

}  // namespace

HostMemory::HostMemory(uint64_t bytes, const std::string& purpose, Device device) : bytes_(bytes) {
  if (bytes == 0) return;
  if (device == Device::cuda) {
    pinned_.reset(pin(bytes, purpose));
    data_ = pinned_.get();
  } else {
    arena_ = Arena(bytes, purpose);
    data_ = arena_.data();
  }
}

void HostMemory::Unpin::operator()([[maybe_unused]] std::byte* memory) const {
#ifdef TROUPE_WITH_CUDA
  cudaFreeHost(
      memory);  // after a fault of the GPU this fails, too, and there is nothing left to do
#endif
}

}  // namespace troupe
