#include "ops/cuda/row_weights.cuh"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// The expert of a live row: the last one that begins at or before it.
__device__ int64_t expert_of_row(const int32_t* offsets, int64_t experts, int64_t row) {
  int64_t low = 0;
  int64_t high = experts;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls each(biases, offsets) for the biases of the first experts, and for those of the last ones
// where they are in a second tensor: one launch each.
template <class Each>
void for_each_bias(const CudaKernelArguments& args, const Each& each) {
  const auto* offsets = args.in<int32_t>(2);
  each(args.input(1), offsets);
  if (args.inputs.size() > 5) each(args.input(5), offsets + args.input(1).shape[0]);
}

// A block for each row.
template <class T>
__global__ void grouped_bias_kernel(const T* x, const T* bias, const int32_t* offsets,
                                    RowWeights<accumulation_t<T>> probabilities, T* y,
                                    int64_t experts, int64_t columns) {
  const int64_t row = blockIdx.x;
  if (row < offsets[0] || row >= offsets[experts]) return;
  const accumulation_t<T> p = probabilities.of_slot(probabilities.slot(row));
  const T* b = bias + expert_of_row(offsets, experts, row) * columns;
  const int64_t first = row * columns;
  for_row(columns,
          [=](int64_t n) { y[first + n] = round_to<T>(widen(x[first + n]) + p * widen(b[n])); });
}

template <class T>
struct GroupedBiasCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    for_each_bias(args, [&](const CudaTensor& bias, const int32_t* offsets) {
      launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
             grouped_bias_kernel<T>, args.in<T>(0), bias.as<T>(), offsets,
             row_weights<accumulation_t<T>>(args, 3), args.out<T>(0), bias.shape[0], shape[1]);
    });
  }
};

constexpr int kBiasColumns = 32;
constexpr int kBiasRows = 8;

// A block for some columns of one expert.
template <class T, class Out>
__global__ void grouped_bias_weight_gradient_kernel(const T* dy, const int32_t* offsets,
                                                    RowWeights<accumulation_t<T>> probabilities,
                                                    Out* d_bias, int64_t columns, bool accumulate) {
  using A = accumulation_t<T>;
  __shared__ A shared[kBiasRows][kBiasColumns];
  const int64_t e = blockIdx.y;
  const int64_t column = int64_t{blockIdx.x} * kBiasColumns + threadIdx.x;
  const int64_t begin = offsets[e];
  const int64_t end = offsets[e + 1];
  if (accumulate && begin == end) return;
  A sum = 0;
  if (column < columns) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kBiasRows) {
      const int64_t slot = probabilities.slot(row);
      if (slot < 0) continue;
      sum += probabilities.of_slot(slot) * widen(dy[row * columns + column]);
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int i = 1; i < kBiasRows; ++i) sum += shared[i][threadIdx.x];
  Out& out = d_bias[e * columns + column];
  out = round_to<Out>(accumulate ? widen(out) + sum : sum);
}

// Out is the type of the gradient.
template <class T, class Out>
void run_weight_gradient(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<GroupedBiasWeightGradientAttributes>();
  const int64_t columns = args.input(0).shape[1];
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(columns, kBiasColumns)),
               static_cast<unsigned>(args.output(0).shape[0])),
          dim3(kBiasColumns, kBiasRows)},
         grouped_bias_weight_gradient_kernel<T, Out>, args.in<T>(0),
         args.in<int32_t>(1) + attributes.first, row_weights<accumulation_t<T>>(args, 2),
         args.out<Out>(0), columns, attributes.accumulate);
}

template <class T>
struct GroupedBiasWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_weight_gradient<T, accumulation_t<T>>(args);
  }
};

// A block for each row.
template <class T>
__global__ void grouped_bias_probability_gradient_kernel(
    const T* dy, const T* bias, const int32_t* offsets, RowWeights<accumulation_t<T>> probabilities,
    accumulation_t<T>* d_probabilities, int64_t experts, int64_t columns) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row < offsets[0] || row >= offsets[experts]) return;
  const int64_t slot = probabilities.slot(row);
  if (slot < 0) return;
  const T* b = bias + expert_of_row(offsets, experts, row) * columns;
  A sum = 0;
  for_row(columns, [&](int64_t n) { sum += widen(b[n]) * widen(dy[row * columns + n]); });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) d_probabilities[slot] = sum;
}

template <class T>
struct GroupedBiasProbabilityGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& shape = args.input(0).shape;
    clear(args, args.out<A>(0), static_cast<size_t>(args.output(0).shape.elements()) * sizeof(A));
    for_each_bias(args, [&](const CudaTensor& bias, const int32_t* offsets) {
      launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], 4)},
             grouped_bias_probability_gradient_kernel<T>, args.in<T>(0), bias.as<T>(), offsets,
             row_weights<A>(args, 3), args.out<A>(0), bias.shape[0], shape[1]);
    });
  }
};

}  // namespace

CudaKernel grouped_bias_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GroupedBiasCuda>(op.input(0).dtype);
}

CudaKernel grouped_bias_weight_gradient_cuda_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_weight_gradient<Bf16, Bf16>;
  return select_cuda_kernel<GroupedBiasWeightGradientCuda>(op.input(0).dtype);
}

CudaKernel grouped_bias_probability_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GroupedBiasProbabilityGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
