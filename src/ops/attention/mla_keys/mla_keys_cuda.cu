#include <algorithm>

#include "ops/attention/mla_keys/mla_keys.h"
#include "ops/attention/rope/turning.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row.
template <class T, int kStep>
__global__ void mla_keys_kernel(const T* key_values, const T* shared_keys,
                                const accumulation_t<T>* table, T* rows,
                                MlaKeysAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  const int plain = attributes.plain_dim;
  const int key = attributes.key_dim();
  const int values = attributes.value_dim;
  const Turning turning{attributes.rotary_dim, attributes.interleaved};
  const A* angles = table + row % attributes.sequence * attributes.rotary_dim;
  const T* kv = key_values + row * attributes.projected_size();
  const T* shared_key = shared_keys + row * attributes.rotary_dim;
  T* out = rows + row * attributes.row_size();
  for_row_steps<kStep>(attributes.key_size(), [&](int64_t i) {
    const int64_t head = i / key;
    const int e = static_cast<int>(i % key) - plain;
    store_step<T, kStep>(out + i,
                         e < 0 ? load_step<T, kStep>(kv + head * (plain + values) + e + plain)
                               : turning.turned_step<T, kStep>(shared_key, e, angles, A(1)));
  });
  out += attributes.key_size();
  for_row_steps<kStep>(int64_t{attributes.heads} * values, [&](int64_t i) {
    const int64_t head = i / values;
    store_step<T, kStep>(out + i,
                         load_step<T, kStep>(kv + head * (plain + values) + plain + i % values));
  });
}

// A block for each row. Shared memory: sums_of_heads of rotary_dim elements.
template <class T, int kStep>
__global__ void mla_keys_gradient_kernel(const T* d_rows, const accumulation_t<T>* table,
                                         T* d_key_values, T* d_shared_keys,
                                         MlaKeysAttributes attributes, int sums_of_heads) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* sums = reinterpret_cast<A*>(memory);
  const int64_t row = blockIdx.x;
  const int plain = attributes.plain_dim;
  const int rotary = attributes.rotary_dim;
  const int key = attributes.key_dim();
  const int values = attributes.value_dim;
  const Turning turning{rotary, attributes.interleaved};
  const A* angles = table + row % attributes.sequence * rotary;
  const T* d_key = d_rows + row * attributes.row_size();
  const T* d_value = d_key + attributes.key_size();
  T* d_kv = d_key_values + row * attributes.projected_size();

  // Each of the sums is over every sums_of_heads-th head.
  const int steps = rotary / kStep;
  const int first_head = static_cast<int>(threadIdx.x) / steps;
  if (first_head < sums_of_heads) {
    for (int step = static_cast<int>(threadIdx.x) % steps; step < steps;
         step += static_cast<int>(blockDim.x)) {
      A sum[kStep] = {};
      for (int head = first_head; head < attributes.heads; head += sums_of_heads) {
        const Pack<T> term =
            load_step<T, kStep>(d_key + int64_t{head} * key + plain + step * kStep);
#pragma unroll
        for (int j = 0; j < kStep; ++j) sum[j] += widen(term.values[j]);
      }
#pragma unroll
      for (int j = 0; j < kStep; ++j) sums[first_head * rotary + step * kStep + j] = sum[j];
    }
  }

  for_row_steps<kStep>(attributes.projected_size(), [&](int64_t i) {
    const int64_t head = i / (plain + values);
    const int e = static_cast<int>(i % (plain + values));
    store_step<T, kStep>(d_kv + i,
                         load_step<T, kStep>(e < plain ? d_key + head * key + e
                                                       : d_value + head * values + e - plain));
  });

  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < rotary; e += static_cast<int>(blockDim.x)) {
    A sum = 0;
    for (int i = 0; i < sums_of_heads; ++i) sum += sums[i * rotary + e];
    sums[e] = sum;
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < rotary; e += static_cast<int>(blockDim.x)) {
    d_shared_keys[row * rotary + e] =
        round_to<T>(turning.turned(sums[e], sums[turning.partner(e)], e, angles, A(-1)));
  }
}

template <class T>
struct MlaKeysCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& attributes = args.attributes->as<MlaKeysAttributes>();
    const bool packs = moves_packs(attributes, dtype_of<T>);
    const int64_t step = packs ? Pack<T>::kElements : 1;
    launch(args,
           {static_cast<unsigned>(args.input(0).shape[0]),
            threads_for_row(attributes.key_size(), step)},
           packs ? mla_keys_kernel<T, Pack<T>::kElements> : mla_keys_kernel<T, 1>, args.in<T>(0),
           args.in<T>(1), args.in<accumulation_t<T>>(2), args.out<T>(0), attributes);
  }
};

template <class T>
struct MlaKeysGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<MlaKeysAttributes>();
    const bool packs = moves_packs(attributes, dtype_of<T>);
    const int step = packs ? Pack<T>::kElements : 1;
    const unsigned threads = threads_for_row(attributes.key_size(), step);
    const int sums =
        std::clamp(static_cast<int>(threads) * step / attributes.rotary_dim, 1, attributes.heads);
    launch(args,
           {static_cast<unsigned>(args.input(0).shape[0]), threads,
            sizeof(A) * static_cast<size_t>(sums * attributes.rotary_dim)},
           packs ? mla_keys_gradient_kernel<T, Pack<T>::kElements> : mla_keys_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<A>(1), args.out<T>(0), args.out<T>(1), attributes, sums);
  }
};

}  // namespace

CudaKernel mla_keys_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<MlaKeysCuda>(op.output(0).dtype);
}

CudaKernel mla_keys_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<MlaKeysGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
