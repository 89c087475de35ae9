#include <type_traits>

#include "ops/adamw/adamw.h"
#include "ops/cuda/device.cuh"

namespace troupe {
namespace {

struct AdamWScalarAddresses {
  const double* learning_rate;
  const double* weight_decay;
  const int64_t* step;
  const double* coefficient;
  const int32_t* skip;
};

// The scalars of one update, as they multiply in the loop: AdamWFactors of adamw_cpu.cc.
template <class A>
struct DeviceAdamWFactors {
  A clip, keep, first_weight, second_decay, second_weight, inverse_root_bias, step_size, epsilon;

  __device__ DeviceAdamWFactors(const AdamWScalarAddresses& scalars,
                                const AdamWAttributes& attributes) {
    const double learning_rate = *scalars.learning_rate;
    const double weight_decay = attributes.decay ? *scalars.weight_decay : 0.0;
    const auto step = static_cast<double>(*scalars.step);
    clip = static_cast<A>(*scalars.coefficient);
    keep = static_cast<A>(1 - learning_rate * weight_decay);
    first_weight = static_cast<A>(1 - attributes.beta1);
    second_decay = static_cast<A>(attributes.beta2);
    second_weight = static_cast<A>(1 - attributes.beta2);
    inverse_root_bias = static_cast<A>(1 / sqrt(1 - pow(attributes.beta2, step)));
    step_size = static_cast<A>(learning_rate / (1 - pow(attributes.beta1, step)));
    epsilon = static_cast<A>(attributes.epsilon);
  }
};

// So many elements that lie side by side, read and written at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Group {
  T values[kCount];
};
template <int kCount, class T>
__device__ __forceinline__ Group<T, kCount> load_group(const T* address) {
  return *reinterpret_cast<const Group<T, kCount>*>(address);
}
template <int kCount, class T>
__device__ __forceinline__ void store_group(T* address, const Group<T, kCount>& group) {
  *reinterpret_cast<Group<T, kCount>*>(address) = group;
}

// The factors are computed once for each block. `master` is the parameter itself where that has the
// accumulation type. Elements are taken kStep at a time, and singly what is left over.
template <class T, class M, class V, int kStep>
__global__ void adamw_kernel(const accumulation_t<T>* gradient, T* parameter,
                             accumulation_t<T>* master, M* exp_avg, V* exp_avg_sq, int64_t elements,
                             AdamWScalarAddresses scalars, AdamWAttributes attributes) {
  using A = accumulation_t<T>;
  if (*scalars.skip != 0) return;
  __shared__ A shared[8];
  if (threadIdx.x == 0) {
    const DeviceAdamWFactors<A> f(scalars, attributes);
    shared[0] = f.clip;
    shared[1] = f.keep;
    shared[2] = f.first_weight;
    shared[3] = f.second_decay;
    shared[4] = f.second_weight;
    shared[5] = f.inverse_root_bias;
    shared[6] = f.step_size;
    shared[7] = f.epsilon;
  }
  __syncthreads();
  const A clip = shared[0], keep = shared[1], first_weight = shared[2], second_decay = shared[3],
          second_weight = shared[4], inverse_root_bias = shared[5], step_size = shared[6],
          epsilon = shared[7];
  const auto update = [=](int64_t i, auto count) {
    constexpr int kCount = decltype(count)::value;
    const Group<A, kCount> g = load_group<kCount>(gradient + i);
    Group<M, kCount> m = load_group<kCount>(exp_avg + i);
    Group<V, kCount> v = load_group<kCount>(exp_avg_sq + i);
    Group<A, kCount> value = load_group<kCount>(master + i);
    Group<T, kCount> rounded;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const A clipped = g.values[j] * clip;
      A average = widen(m.values[j]);
      average = average + first_weight * (clipped - average);
      A square = widen(v.values[j]);
      square = second_decay * square + second_weight * clipped * clipped;
      m.values[j] = round_to<M>(average);
      v.values[j] = round_to<V>(square);
      A& weight = value.values[j];
      weight = weight * keep - step_size * average / (sqrt(square) * inverse_root_bias + epsilon);
      rounded.values[j] = round_to<T>(weight);
    }
    store_group(exp_avg + i, m);
    store_group(exp_avg_sq + i, v);
    store_group(master + i, value);
    if constexpr (!std::is_same_v<T, A>) store_group(parameter + i, rounded);
  };
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t whole = elements / kStep * kStep;
  for (int64_t i = thread * kStep; i < whole; i += threads * kStep) {
    update(i, std::integral_constant<int, kStep>{});
  }
  for (int64_t i = whole + thread; i < elements; i += threads) {
    update(i, std::integral_constant<int, 1>{});
  }
}

// T, M and V are the types of the parameter, of exp_avg and of exp_avg_sq.
template <class T, class M, class V>
void run_adamw(const CudaKernelArguments& args) {
  using A = accumulation_t<T>;
  const auto& attributes = args.attributes->as<AdamWAttributes>();
  const int64_t elements = args.output(1).shape.elements();
  T* parameter = args.out<T>(0) + attributes.first;
  A* master = nullptr;
  if constexpr (std::is_same_v<T, A>) {
    master = parameter;
  } else {
    master = args.out<A>(3);
  }
  // A shard may begin anywhere in its parameter.
  constexpr int kStep = Pack<A>::kElements;
  const bool steps = attributes.first % kStep == 0;
  launch(args, {blocks_for(elements, 256 * (steps ? kStep : 1)), 256},
         steps ? adamw_kernel<T, M, V, kStep> : adamw_kernel<T, M, V, 1>,
         args.in<A>(1) + attributes.first, parameter, master, args.out<M>(1), args.out<V>(2),
         elements,
         AdamWScalarAddresses{args.in<double>(5), args.in<double>(6), args.in<int64_t>(7),
                              args.in<double>(8), args.in<int32_t>(9)},
         attributes);
}

template <class T>
CudaKernel select_moments(const OpView& op) {
  const bool narrow_mean = op.input(2).dtype == DType::bf16;
  const bool narrow_square = op.input(3).dtype == DType::bf16;
  if (narrow_mean) {
    return narrow_square ? &run_adamw<T, Bf16, Bf16> : &run_adamw<T, Bf16, float>;
  }
  return narrow_square ? &run_adamw<T, float, Bf16> : &run_adamw<T, float, float>;
}

}  // namespace

CudaKernel adamw_cuda_kernel(const OpView& op) {
  switch (op.input(0).dtype) {
    case DType::f64:
      return &run_adamw<double, double, double>;
    case DType::f32:
      return select_moments<float>(op);
    default:
      return select_moments<Bf16>(op);
  }
}

}  // namespace troupe
