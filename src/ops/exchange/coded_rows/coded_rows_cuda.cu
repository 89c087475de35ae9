#include "ops/exchange/coded_rows/coded_block.cuh"
#include "ops/exchange/coded_rows/coded_rows.h"

namespace troupe {
namespace {

// A thread has eight elements of a row, four threads side by side a block.
constexpr int kStep = 8;
constexpr int kLanes = static_cast<int>(kCodedBlock) / kStep;
constexpr int kThreads = 256;

struct Steps {
  float values[kStep];
};

template <class T>
__device__ __forceinline__ Steps load_steps(const T* x) {
  constexpr int kElements = Pack<T>::kElements;
  Steps steps;
#pragma unroll
  for (int first = 0; first < kStep; first += kElements) {
    const Pack<T> pack = load_pack(x + first);
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      steps.values[first + j] = static_cast<float>(widen(pack.values[j]));
    }
  }
  return steps;
}

template <class T>
__device__ __forceinline__ void decode(uint64_t codes, uint8_t scale, T* y) {
  constexpr int kElements = Pack<T>::kElements;
#pragma unroll
  for (int first = 0; first < kStep; first += kElements) {
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      pack.values[j] = decode_element<T>(codes, first + j, scale);
    }
    store_pack(y + first, pack);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    encode_rows_kernel(const T* x, uint8_t* coded, int64_t steps, int64_t steps_of_row) {
  const int64_t elements = steps_of_row * kStep;
  const int64_t bytes = coded_row_bytes(elements);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < steps; i += stride) {
    const int64_t row = i / steps_of_row;
    const int64_t step = i % steps_of_row;
    uint8_t* to = coded + row * bytes;
    uint8_t scale;
    *reinterpret_cast<uint64_t*>(to + step * kStep) =
        encode_step(load_steps(x + i * kStep).values, &scale);
    if (step % kLanes == 0) to[elements + step / kLanes] = scale;
    const int64_t padding = elements + elements / kCodedBlock;
    for (int64_t at = padding + step; at < bytes; at += steps_of_row) to[at] = 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_rows_kernel(const uint8_t* coded, LiveRows rows, const int32_t* received,
                       int64_t section, T* y, int64_t steps_of_row) {
  const int64_t elements = steps_of_row * kStep;
  const int64_t bytes = coded_row_bytes(elements);
  const int64_t steps = rows.count() * steps_of_row;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < steps; i += stride) {
    const int64_t row = i / steps_of_row;
    if (received != nullptr && row % section >= received[row / section]) continue;
    const int64_t step = i % steps_of_row;
    const uint8_t* from = coded + row * bytes;
    decode(*reinterpret_cast<const uint64_t*>(from + step * kStep), from[elements + step / kLanes],
           y + i * kStep);
  }
}

// y may be x.
template <class T>
__global__ void __launch_bounds__(kThreads) round_rows_kernel(const T* x, T* y, int64_t steps) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < steps; i += stride) {
    uint8_t scale;
    const uint64_t codes = encode_step(load_steps(x + i * kStep).values, &scale);
    decode(codes, scale, y + i * kStep);
  }
}

template <class T>
struct EncodeRowsCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    const int64_t steps = shape.elements() / kStep;
    launch(args, {blocks_for(args, steps, kThreads), kThreads}, encode_rows_kernel<T>,
           args.in<T>(0), args.out<uint8_t>(0), steps, shape[1] / kStep);
  }
};

template <class T>
struct DecodeRowsCuda {
  static void run(const CudaKernelArguments& args) {
    const CudaTensor& received = args.input(1);
    const LiveRows rows(args.input(0));
    const int64_t steps_of_row = args.output(0).shape[1] / kStep;
    const int64_t section = received.data == nullptr ? 0 : rows.bound / received.shape[0];
    launch(args, {blocks_for(args, rows.expected * steps_of_row, kThreads), kThreads},
           decode_rows_kernel<T>, args.in<uint8_t>(0), rows,
           static_cast<const int32_t*>(received.data), section, args.out<T>(0), steps_of_row);
  }
};

template <class T>
struct RoundRowsCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t steps = args.input(0).shape.elements() / kStep;
    launch(args, {blocks_for(args, steps, kThreads), kThreads}, round_rows_kernel<T>, args.in<T>(0),
           args.out<T>(0), steps);
  }
};

void copy_rows(const CudaKernelArguments& args) {
  const CudaTensor& x = args.input(0);
  if (x.data == args.output(0).data) return;
  check_cuda(cudaMemcpyAsync(args.output(0).data, x.data,
                             static_cast<size_t>(x.shape.elements()) * size_of(x.dtype),
                             cudaMemcpyDeviceToDevice, args.stream),
             "copying rows");
}

}  // namespace

CudaKernel encode_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<EncodeRowsCuda>(op.input(0).dtype);
}

CudaKernel decode_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<DecodeRowsCuda>(op.output(0).dtype);
}

CudaKernel round_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<RoundRowsCuda>(op.input(0).dtype);
}

CudaKernel round_gradient_cuda_kernel(const OpView&) {
  return &copy_rows;
}

}  // namespace troupe
