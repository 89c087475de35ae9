#include "runtime/device_limits.h"

#include "base/error.h"

#ifdef TROUPE_WITH_CUDA
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

#include "base/random.h"
#include "ops/cuda/context.h"
#include "program/cuda/check.h"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

constexpr const char* kPurpose = "measuring the GPU's speed";
constexpr int kRuns = 5;

// The shortest of a few times that `work` takes on a stream, in seconds.
double shortest_time(const std::function<void(cudaStream_t)>& work) {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), kPurpose);
  check_cuda(cudaEventCreate(&begin), kPurpose);
  check_cuda(cudaEventCreate(&end), kPurpose);
  double shortest = 0;
  for (int run = 0; run <= kRuns; ++run) {
    check_cuda(cudaEventRecord(begin, stream), kPurpose);
    work(stream);
    check_cuda(cudaEventRecord(end, stream), kPurpose);
    check_cuda(cudaStreamSynchronize(stream), kPurpose);
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), kPurpose);
    const double seconds = static_cast<double>(milliseconds) * 1e-3;
    // The first run chooses and loads a kernel.
    if (run == 1 || (run > 1 && seconds < shortest)) shortest = seconds;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return shortest;
}

// Numbers in [-1, 1), from a pattern that repeats at a length which no row of a matrix has.
std::vector<std::byte> random_matrix(DType dtype, int64_t elements) {
  constexpr size_t kPattern = 65521;
  std::vector<std::byte> pattern;
  for (size_t i = 0; i < kPattern; ++i) {
    const double value = 2 * random_uniform(/*seed=*/1, RandomStream::test, 0, i) - 1;
    const auto append = [&](const auto& number) {
      const auto* bytes = reinterpret_cast<const std::byte*>(&number);
      pattern.insert(pattern.end(), bytes, bytes + sizeof(number));
    };
    if (dtype == DType::f64) append(value);
    if (dtype == DType::f32) append(static_cast<float>(value));
    if (dtype == DType::bf16) append(bf16(value));
    if (dtype == DType::f16) append(f16(value));
  }
  std::vector<std::byte> matrix(static_cast<size_t>(elements) * size_of(dtype));
  for (size_t at = 0; at < matrix.size(); at += pattern.size()) {
    std::memcpy(matrix.data() + at, pattern.data(), std::min(pattern.size(), matrix.size() - at));
  }
  return matrix;
}

}  // namespace

double measure_device_matmul_limit(DType dtype) {
  const int64_t side = is_half(dtype) ? 8192 : 4096;
  const std::vector<std::byte> numbers = random_matrix(dtype, side * side);
  const DeviceMemory left(numbers.size(), kPurpose);
  const DeviceMemory right(numbers.size(), kPurpose);
  const DeviceMemory out(numbers.size(), kPurpose);
  const DeviceMemory scratch(kProductScratchBytes, kPurpose);
  left.copy_in(numbers.data(), 0, left.bytes());
  right.copy_in(numbers.data(), 0, right.bytes());
  CudaContext context;
  const DenseProduct product{.m = side,
                             .n = side,
                             .k = side,
                             .left = {left.data(), dtype, side, false},
                             .right = {right.data(), dtype, side, true},
                             .out = out.data(),
                             .out_dtype = dtype};
  const double seconds = shortest_time([&](cudaStream_t stream) {
    TROUPE_CHECK(context.multiply(product, stream, scratch.data()),
                 "cuBLASLt has no algorithm for a square product");
  });
  const auto n = static_cast<double>(side);
  return 2 * n * n * n / seconds;
}

double measure_device_copy_limit() {
  constexpr uint64_t kBytes = uint64_t{1} << 29;
  const DeviceMemory from(kBytes, kPurpose);
  const DeviceMemory to(kBytes, kPurpose);
  const double seconds = shortest_time([&](cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
               kPurpose);
  });
  return 2.0 * static_cast<double>(kBytes) / seconds;
}

}  // namespace troupe

#else

namespace troupe {

double measure_device_matmul_limit(DType) {
  TROUPE_CHECK(false, "this build has no CUDA");
}

double measure_device_copy_limit() {
  TROUPE_CHECK(false, "this build has no CUDA");
}

}  // namespace troupe

#endif
