// Building blocks of the CUDA kernels: element types, live rows, sums over a block, launches.
//
// Kernels are templates over T = double, float, Bf16 or F16 and compute in accumulation_t<T>. A sum
// over a block adds its threads' parts in a fixed order, so a result depends on the operands and
// the launch alone, never on timing; there are no floating-point atomics.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <type_traits>

#include "base/dtype.h"
#include "base/error.h"
#include "program/cuda/check.h"
#include "program/cuda_kernel.h"
#include "program/select_kernel.h"

namespace troupe {

// bf16 and f16 (base/dtype.h) as the GPU knows them: the same bits, the same rounding.
using Bf16 = __nv_bfloat16;
template <>
inline constexpr DType dtype_of<Bf16> = DType::bf16;
using F16 = __half;
template <>
inline constexpr DType dtype_of<F16> = DType::f16;

// The value in the type that it is computed with.
__device__ __forceinline__ double widen(double value) {
  return value;
}
__device__ __forceinline__ float widen(float value) {
  return value;
}
__device__ __forceinline__ float widen(Bf16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float widen(F16 value) {
  return __half2float(value);
}

// Rounded to nearest even, where it is narrower than float from float.
template <class T>
__device__ __forceinline__ T round_to(float value) {
  if constexpr (std::is_same_v<T, Bf16>) return __float2bfloat16_rn(value);
  if constexpr (std::is_same_v<T, F16>) return __float2half_rn(value);
  return static_cast<T>(value);
}
template <class T>
__device__ __forceinline__ T round_to(double value) {
  if constexpr (sizeof(T) == 2) return round_to<T>(static_cast<float>(value));
  return static_cast<T>(value);
}

// A value of one type as one of another, through double where that is wider than float.
template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  return round_to<To>(widen(value));
}

template <class A>
__device__ __forceinline__ A infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000LL);
}

// 1 / (1 + e^-x); the exponential of the negative magnitude cannot overflow.
template <class A>
__device__ __forceinline__ A sigmoid(A x) {
  const A e = exp(-fabs(x));
  return (x >= A(0) ? A(1) : e) / (A(1) + e);
}

// 16 bytes of a tensor's elements.
template <class T>
struct alignas(16) Pack {
  static constexpr int kElements = 16 / sizeof(T);
  T values[kElements];
};

// How many rows of a tensor there are: all, or as many as the program has counted.
struct LiveRows {
  const int32_t* live = nullptr;
  int64_t bound = 0;
  int64_t expected = 0;  // for sizes of launches

  LiveRows() = default;
  explicit LiveRows(const CudaTensor& tensor)
      : live(tensor.live_rows),
        bound(tensor.shape.rank() == 0 ? 1 : tensor.shape[0]),
        expected(tensor.expected_rows > 0 ? std::min(tensor.expected_rows, bound) : bound) {}
  __device__ int64_t count() const {
    if (live == nullptr) return bound;
    const int64_t rows = *live;
    return rows < bound ? rows : bound;
  }
};

// Sums and maxima over a block. `shared` is room for 32 numbers that nothing else uses until the
// next synchronisation of the block; every thread gets the result.
template <class A>
__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, width);
  }
  return value;
}

// NaN is passed over.
template <class A>
__device__ __forceinline__ A warp_max(A value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const A other = __shfl_xor_sync(0xffffffffU, value, width);
    value = other > value ? other : value;
  }
  return value;
}

template <class A, class Combine>
__device__ __forceinline__ A block_combine(A value, A* shared, A neutral, const Combine& combine) {
  value = combine(value);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return combine(lane < warps ? shared[lane] : neutral);
}

template <class A>
__device__ __forceinline__ A block_sum(A value, A* shared) {
  return block_combine(value, shared, A(0), [](A x) { return warp_sum(x); });
}

template <class A>
__device__ __forceinline__ A block_max(A value, A* shared) {
  return block_combine(value, shared, -infinity<A>(), [](A x) { return warp_max(x); });
}

inline int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Launching.
// A grid has at most this many blocks for each multiprocessor where threads loop over their work.
inline constexpr int64_t kMostBlocksEach = 16;

// Blocks for each of `pieces` that a grid has side by side: of all together about two for each
// multiprocessor, as a copy between GPUs takes.
inline int64_t most_blocks_of_piece(const CudaKernelArguments& args, int64_t pieces) {
  return std::max<int64_t>(1, 2 * args.multiprocessors / pieces);
}

// Blocks of `threads` for `items` of which each thread takes one at a time; at least one block.
inline unsigned blocks_for(const CudaKernelArguments& args, int64_t items, int64_t threads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_divide(items, threads), 1, args.multiprocessors * kMostBlocksEach));
}

// Threads for rows of `elements`, each thread taking `step` at a time.
inline constexpr int kMostRowThreads = 256;
inline unsigned threads_for_row(int64_t elements, int64_t step) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(ceil_divide(ceil_divide(elements, step), 32) * 32, 32, kMostRowThreads));
}

struct Launch {
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  size_t shared_bytes = 0;
};

template <class... Parameters, class... Values>
void launch(const CudaKernelArguments& args, const Launch& shape, void (*kernel)(Parameters...),
            Values... values) {
  kernel<<<shape.grid, shape.block, shape.shared_bytes, args.stream>>>(
      static_cast<Parameters>(values)...);
  check_cuda(cudaGetLastError(), "launching a kernel");
}

// Fills memory with zeros.
inline void clear(const CudaKernelArguments& args, void* data, size_t bytes) {
  check_cuda(cudaMemsetAsync(data, 0, bytes, args.stream), "clearing memory");
}

// Lets a kernel have more shared memory than 48 KiB.
template <class... Parameters>
void allow_shared_bytes(void (*kernel)(Parameters...), size_t bytes) {
  check_cuda(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "asking for shared memory");
}

// Kernel<T>::run for the type that `dtype` is on the GPU.
template <template <class> class Kernel>
CudaKernel select_cuda_kernel(DType dtype) {
  return select_kernel_of<Kernel, Bf16, F16>(dtype);
}

// Live elements of a tensor, on the GPU.
__device__ __forceinline__ int64_t live_elements(const LiveRows& rows, int64_t row_elements) {
  return rows.count() * row_elements;
}

// Calls body(index, count) for pieces of `elements` contiguous elements from `index` on: whole
// packs of 16 bytes, then what is left over, one by one. For kernels over all threads of a grid.
template <class T, class Packed, class Single>
__device__ __forceinline__ void for_packs(int64_t elements, const Packed& packed,
                                          const Single& single) {
  constexpr int64_t kElements = Pack<T>::kElements;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t packs = elements / kElements;
  for (int64_t i = thread; i < packs; i += threads) packed(i * kElements);
  for (int64_t i = packs * kElements + thread; i < elements; i += threads) single(i);
}

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T>*>(address);
}
template <class T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(address) = pack;
}

// Copies units of one type, by all threads of a grid along x; each has several under way at once,
// because memory of another GPU is far away.
template <class Unit>
__device__ __forceinline__ void copy_units(const Unit* from, Unit* to, int64_t units) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  constexpr int kFlight = 4;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kFlight - 1) * threads < units; i += kFlight * threads) {
    Unit values[kFlight];
#pragma unroll
    for (int j = 0; j < kFlight; ++j) values[j] = from[i + j * threads];
#pragma unroll
    for (int j = 0; j < kFlight; ++j) to[i + j * threads] = values[j];
  }
  for (; i < units; i += threads) to[i] = from[i];
}

// Rows are read and written kStep elements at a time: a pack where every row is made of packs
// (is_made_of_packs), or one.
template <class T>
bool is_made_of_packs(int64_t row_elements) {
  return is_made_of_packs(row_elements, dtype_of<T>);
}
template <class T, int kStep>
__device__ __forceinline__ Pack<T> load_step(const T* address) {
  Pack<T> pack;
  if constexpr (kStep == 1) {
    pack.values[0] = *address;
  } else {
    pack = load_pack(address);
  }
  return pack;
}
template <class T, int kStep>
__device__ __forceinline__ void store_step(T* address, const Pack<T>& pack) {
  if constexpr (kStep == 1) {
    *address = pack.values[0];
  } else {
    store_pack(address, pack);
  }
}

// Calls body(i) for the first elements i of the steps of a row that this thread of the block has.
template <int kStep, class Body>
__device__ __forceinline__ void for_row_steps(int64_t n, const Body& body) {
  for (int64_t i = int64_t{threadIdx.x} * kStep; i < n; i += int64_t{blockDim.x} * kStep) body(i);
}

// Calls body(i) for the elements i of a row that this thread of the block has.
template <class Body>
__device__ __forceinline__ void for_row(int64_t n, const Body& body) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) body(i);
}

}  // namespace troupe
