#include "ops/attention/cuda/key_gradients.h"
#include "ops/cuda/device.cuh"

namespace troupe {
namespace {

__global__ void add_key_gradients_kernel(const Bf16* part, float* sum, int64_t elements,
                                         int64_t first_new) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const float value = widen(part[i]);
    sum[i] = i < first_new ? sum[i] + value : value;
  }
}

__global__ void round_key_gradients_kernel(const float* sum, int64_t key_elements, int64_t elements,
                                           Bf16* d_k, Bf16* d_v, int64_t stride) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const int64_t row = i / (2 * key_elements);
    const int64_t column = i % (2 * key_elements);
    Bf16* const to = column < key_elements ? d_k + column : d_v + (column - key_elements);
    to[row * stride] = round_to<Bf16>(sum[i]);
  }
}

}  // namespace

void add_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sums, int64_t begin,
                       int64_t end, int64_t first_new) {
  const int64_t row = 2 * sums.key_elements;
  const int64_t elements = (end - begin) * row;
  launch(args, {blocks_for(elements, 256), 256}, add_key_gradients_kernel,
         reinterpret_cast<const Bf16*>(sums.part), sums.sum + begin * row, elements,
         (first_new - begin) * row);
}

void round_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sums,
                         int64_t sequence, bf16* d_k, bf16* d_v, int64_t stride) {
  const int64_t elements = sequence * 2 * sums.key_elements;
  launch(args, {blocks_for(elements, 256), 256}, round_key_gradients_kernel,
         static_cast<const float*>(sums.sum), sums.key_elements, elements,
         reinterpret_cast<Bf16*>(d_k), reinterpret_cast<Bf16*>(d_v), stride);
}

}  // namespace troupe
