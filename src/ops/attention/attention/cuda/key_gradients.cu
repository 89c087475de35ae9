#include "ops/attention/attention/cuda/key_gradients.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kColumnThreads = 128;  // a row has at least as many elements

// Of rows [first_row, first_row + rows) of each sum; a block takes row after row.
__global__ void add_key_gradients_kernel(KeyGradientPart part, KeyGradientSum sum, bool first,
                                         int64_t first_row, int64_t rows) {
  const int64_t width = sum.key_elements + sum.value_elements;
  const auto* parts = reinterpret_cast<const Bf16*>(part.rows);
  for (int64_t i = blockIdx.x; i < part.batch * rows; i += gridDim.x) {
    const int64_t b = i / rows;
    const int64_t row = first_row + i % rows;
    const int64_t to = (b * sum.positions + row) * sum.stride;
    const bool has_part = row >= part.begin && row < part.end;
    const Bf16* from = parts + (b * (part.end - part.begin) + row - part.begin) * width;
    for (int64_t column = threadIdx.x; column < width; column += kColumnThreads) {
      float* const element = column < sum.key_elements ? sum.k + to + column
                                                       : sum.v + to + (column - sum.key_elements);
      const float value = has_part ? widen(from[column]) : 0.0F;
      *element = first ? value : *element + value;
    }
  }
}

__global__ void round_key_gradients_kernel(KeyGradientSum sum, Bf16* d_k, Bf16* d_v,
                                           int64_t stride) {
  for (int64_t row = blockIdx.x; row < sum.positions; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < sum.key_elements; i += kColumnThreads) {
      d_k[row * stride + i] = round_to<Bf16>(sum.k[row * sum.stride + i]);
    }
    for (int64_t i = threadIdx.x; i < sum.value_elements; i += kColumnThreads) {
      d_v[row * stride + i] = round_to<Bf16>(sum.v[row * sum.stride + i]);
    }
  }
}

}  // namespace

void add_key_gradients(const CudaKernelArguments& args, const KeyGradientPart& part,
                       const KeyGradientSum& sum, bool first) {
  const int64_t first_row = first ? 0 : part.begin;
  const int64_t rows = first ? sum.positions : part.end - part.begin;
  launch(args, {blocks_for(args, part.batch * rows, 1), kColumnThreads}, add_key_gradients_kernel,
         part, sum, first, first_row, rows);
}

void round_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sum, bf16* d_k,
                         bf16* d_v, int64_t stride) {
  launch(args, {blocks_for(args, sum.positions, 1), kColumnThreads}, round_key_gradients_kernel,
         sum, reinterpret_cast<Bf16*>(d_k), reinterpret_cast<Bf16*>(d_v), stride);
}

}  // namespace troupe
