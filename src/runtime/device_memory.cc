#include "runtime/device_memory.h"

#include <atomic>
#include <functional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "runtime/cuda_libraries.h"

#ifdef TROUPE_WITH_CUDA
#include <cuda_runtime.h>

#include "program/cuda/check.h"
#endif

namespace troupe {

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      gpu_(other.gpu_) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(gpu_, other.gpu_);
  return *this;
}

void require_gpu() {
  const std::string reason = why_no_gpu();
  if (!reason.empty()) {
    throw_bad_request("--device cuda: no GPU can be used on this machine (" + reason +
                      "). Use --device cpu.");
  }
  const std::string problem = cuda_library_problem();
  if (!problem.empty()) throw_failed("--device cuda: " + problem + ".");
}

DeviceTraits traits_of(Device device, int gpu) {
  return device == Device::cuda ? device_traits(gpu) : DeviceTraits();
}

DeviceTraits planned_traits() {
  return gpu_count() > 0 ? device_traits(0) : DeviceTraits();
}

#ifdef TROUPE_WITH_CUDA

namespace {

std::atomic<uint64_t> gpu_allocated{0};
std::atomic<uint64_t> gpu_peak{0};

}  // namespace

bool has_cuda() {
  return true;
}

std::string why_no_gpu() {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess) return cudaGetErrorString(found);
  return devices > 0 ? "" : "there is none";
}

int gpu_count() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess ? devices : 0;
}

void use_gpu(int gpu) {
  check_cuda(cudaSetDevice(gpu), "choosing GPU " + std::to_string(gpu));
}

uint64_t gpu_identity(int gpu) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, gpu), "asking for the GPU's properties");
  return std::hash<std::string_view>()({properties.uuid.bytes, sizeof(properties.uuid.bytes)});
}

DeviceTraits device_traits(int gpu) {
  const auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, gpu), "asking what the GPU is");
    return value;
  };
  return {.compute_capability =
              10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor),
          .multiprocessors = ask(cudaDevAttrMultiProcessorCount)};
}

namespace {

struct GpuBytes {
  size_t free = 0;
  size_t total = 0;
};

GpuBytes bytes_of(int gpu) {
  use_gpu(gpu);
  GpuBytes bytes;
  check_cuda(cudaMemGetInfo(&bytes.free, &bytes.total), "asking the GPU for its memory");
  return bytes;
}

}  // namespace

uint64_t available_device_bytes(int gpu) {
  return bytes_of(gpu).free;
}

uint64_t total_device_bytes(int gpu) {
  return bytes_of(gpu).total;
}

DeviceMemory::DeviceMemory(uint64_t bytes, const std::string& purpose, int gpu)
    : bytes_(bytes), gpu_(gpu) {
  require_gpu();
  if (bytes == 0) return;
  use_gpu(gpu);
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // the failure is not remembered
    throw UserError(ExitStatus::does_not_fit,
                    "The GPU refuses " + format_bytes(bytes) + " for " + purpose + "; " +
                        format_bytes(available_device_bytes(gpu)) +
                        " are free. Use a smaller model, sequence or micro-batch.");
  }
  check_cuda(error, "allocating memory");
  data_ = static_cast<std::byte*>(memory);
  check_cuda(cudaMemset(data_, 0, bytes), "clearing memory");
  // Not all of the GPU: another rank's step may run there, and wait for this one.
  check_cuda(cudaStreamSynchronize(nullptr), "clearing memory");
  const uint64_t now = gpu_allocated.fetch_add(bytes) + bytes;
  uint64_t seen = gpu_peak.load();
  while (now > seen && !gpu_peak.compare_exchange_weak(seen, now)) {
  }
}

uint64_t DeviceMemory::peak_allocated_bytes() {
  return gpu_peak.load();
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  cudaSetDevice(gpu_);
  cudaFree(data_);  // after a fault of the GPU this fails, too, and there is nothing left to do
  gpu_allocated.fetch_sub(bytes_);
}

void DeviceMemory::copy_in(const std::byte* host, uint64_t begin, uint64_t bytes) const {
  if (bytes == 0) return;
  use_gpu(gpu_);
  check_cuda(cudaMemcpy(data_ + begin, host, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
  // The host's memory has been read, but the last of it may still be on its way.
  check_cuda(cudaStreamSynchronize(nullptr), "copying to the GPU");
}

void DeviceMemory::copy_out(std::byte* host, uint64_t begin, uint64_t bytes) const {
  if (bytes == 0) return;
  use_gpu(gpu_);
  check_cuda(cudaMemcpy(host, data_ + begin, bytes, cudaMemcpyDeviceToHost),
             "copying from the GPU");
}

#else

bool has_cuda() {
  return false;
}

std::string why_no_gpu() {
  return "this build has no CUDA";
}

int gpu_count() {
  return 0;
}

void use_gpu(int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

uint64_t gpu_identity(int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

DeviceTraits device_traits(int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

uint64_t available_device_bytes(int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

uint64_t total_device_bytes(int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

DeviceMemory::DeviceMemory(uint64_t, const std::string&, int) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

uint64_t DeviceMemory::peak_allocated_bytes() {
  return 0;
}

DeviceMemory::~DeviceMemory() {
  TROUPE_CHECK(data_ == nullptr, "this build has no CUDA");
}
void DeviceMemory::copy_in(const std::byte*, uint64_t, uint64_t) const {}
void DeviceMemory::copy_out(std::byte*, uint64_t, uint64_t) const {}

#endif

}  // namespace troupe
