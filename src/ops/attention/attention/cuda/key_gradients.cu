#include "ops/attention/attention/cuda/key_gradients.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kColumnThreads = 128;  // a row has at least as many elements

// Of rows [first_row, first_row + rows) of each sum; a block takes row after row.
template <class T>
__global__ void add_key_gradients_kernel(KeyGradientPart part, KeyGradientSum sum, bool first,
                                         int64_t first_row, int64_t rows) {
  const int64_t width = sum.key_elements + sum.value_elements;
  const auto* parts = static_cast<const T*>(part.rows);
  for (int64_t i = blockIdx.x; i < part.batch * rows; i += gridDim.x) {
    const int64_t b = i / rows;
    const int64_t row = first_row + i % rows;
    const int64_t to = (b * sum.positions + row) * sum.stride;
    const bool has_part = row >= part.begin && row < part.end;
    const T* from = parts + (b * (part.end - part.begin) + row - part.begin) * width;
    for (int64_t column = threadIdx.x; column < width; column += kColumnThreads) {
      float* const element = column < sum.key_elements ? sum.k + to + column
                                                       : sum.v + to + (column - sum.key_elements);
      const float value = has_part ? widen(from[column]) : 0.0F;
      *element = first ? value : *element + value;
    }
  }
}

template <class T>
__global__ void round_key_gradients_kernel(KeyGradientSum sum, T* d_k, T* d_v, int64_t stride) {
  for (int64_t row = blockIdx.x; row < sum.positions; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < sum.key_elements; i += kColumnThreads) {
      d_k[row * stride + i] = round_to<T>(sum.k[row * sum.stride + i]);
    }
    for (int64_t i = threadIdx.x; i < sum.value_elements; i += kColumnThreads) {
      d_v[row * stride + i] = round_to<T>(sum.v[row * sum.stride + i]);
    }
  }
}

}  // namespace

void add_key_gradients(const CudaKernelArguments& args, const KeyGradientPart& part,
                       const KeyGradientSum& sum, bool first) {
  const int64_t first_row = first ? 0 : part.begin;
  const int64_t rows = first ? sum.positions : part.end - part.begin;
  launch(args, {blocks_for(args, part.batch * rows, 1), kColumnThreads},
         part.dtype == DType::f16 ? add_key_gradients_kernel<F16> : add_key_gradients_kernel<Bf16>,
         part, sum, first, first_row, rows);
}

void round_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sum, DType dtype,
                         void* d_k, void* d_v, int64_t stride) {
  const auto round = [&]<class T>(T) {
    launch(args, {blocks_for(args, sum.positions, 1), kColumnThreads},
           round_key_gradients_kernel<T>, sum, static_cast<T*>(d_k), static_cast<T*>(d_v), stride);
  };
  if (dtype == DType::f16) {
    round(F16());
  } else {
    round(Bf16());
  }
}

}  // namespace troupe
