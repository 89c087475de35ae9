#include <type_traits>

#include "ops/cuda/random.cuh"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/optimizer/parameter_dtype.h"
#include "program/cuda/device.cuh"

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

  __device__ A updated(A weight, A average, A square) const {
    return weight * keep - step_size * average / (sqrt(square) * inverse_root_bias + epsilon);
  }
};

// Computed by one thread of a block, into `shared`. All threads must call it.
template <class A>
__device__ DeviceAdamWFactors<A> adamw_factors(const AdamWScalarAddresses& scalars,
                                               const AdamWAttributes& attributes,
                                               DeviceAdamWFactors<A>& shared) {
  if (threadIdx.x == 0) {
    const double learning_rate = *scalars.learning_rate;
    const double weight_decay = attributes.decay ? *scalars.weight_decay : 0.0;
    const auto step = static_cast<double>(*scalars.step);
    shared.clip = static_cast<A>(*scalars.coefficient);
    shared.keep = static_cast<A>(1 - learning_rate * weight_decay);
    shared.first_weight = static_cast<A>(1 - attributes.beta1);
    shared.second_decay = static_cast<A>(attributes.beta2);
    shared.second_weight = static_cast<A>(1 - attributes.beta2);
    shared.inverse_root_bias = static_cast<A>(1 / sqrt(1 - pow(attributes.beta2, step)));
    shared.step_size = static_cast<A>(learning_rate / (1 - pow(attributes.beta1, step)));
    shared.epsilon = static_cast<A>(attributes.epsilon);
  }
  __syncthreads();
  return shared;
}

// kCount elements that lie side by side, read and written at once.
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
// accumulation type; `parameter` may be null. Elements are taken kStep at a time, and singly what
// is left over.
template <class T, class G, class M, class V, int kStep>
__global__ void adamw_kernel(const G* gradient, T* parameter, accumulation_t<T>* master, M* exp_avg,
                             V* exp_avg_sq, int64_t elements, AdamWScalarAddresses scalars,
                             AdamWAttributes attributes) {
  using A = accumulation_t<T>;
  if (*scalars.skip != 0) return;
  __shared__ DeviceAdamWFactors<A> shared;
  const DeviceAdamWFactors<A> factors = adamw_factors(scalars, attributes, shared);
  const auto update = [=](int64_t i, auto count) {
    constexpr int kCount = decltype(count)::value;
    const Group<G, kCount> g = load_group<kCount>(gradient + i);
    Group<M, kCount> m = load_group<kCount>(exp_avg + i);
    Group<V, kCount> v = load_group<kCount>(exp_avg_sq + i);
    Group<A, kCount> value = load_group<kCount>(master + i);
    Group<T, kCount> rounded;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const A clipped = widen(g.values[j]) * factors.clip;
      A average = widen(m.values[j]);
      average = average + factors.first_weight * (clipped - average);
      A square = widen(v.values[j]);
      square = factors.second_decay * square + factors.second_weight * clipped * clipped;
      m.values[j] = round_to<M>(average);
      v.values[j] = round_to<V>(square);
      A& weight = value.values[j];
      weight = factors.updated(weight, average, square);
      rounded.values[j] = round_to<T>(weight);
    }
    store_group(exp_avg + i, m);
    store_group(exp_avg_sq + i, v);
    store_group(master + i, value);
    if constexpr (!std::is_same_v<T, A>) {
      if (parameter != nullptr) store_group(parameter + i, rounded);
    }
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

// T, G, M and V are the types of the parameter, of the gradient, of exp_avg and of exp_avg_sq.
template <class T, class G, class M, class V>
void run_adamw(const CudaKernelArguments& args) {
  using A = accumulation_t<T>;
  const auto& attributes = args.attributes->as<AdamWAttributes>();
  // Without a parameter, outputs begin with the moments.
  const bool has_parameter = args.in<T>(0) != nullptr;
  const int moments = has_parameter ? 1 : 0;
  const int64_t elements = args.output(moments).shape.elements();
  T* parameter = has_parameter ? args.out<T>(0) + attributes.first : nullptr;
  A* master = nullptr;
  if constexpr (std::is_same_v<T, A>) {
    master = parameter;
  } else {
    master = args.out<A>(moments + 2);
  }
  // A shard may begin anywhere in its parameter.
  constexpr int kStep = Pack<A>::kElements;
  const bool steps = attributes.first % kStep == 0;
  launch(args, {blocks_for(args, elements, 256 * (steps ? kStep : 1)), 256},
         steps ? adamw_kernel<T, G, M, V, kStep> : adamw_kernel<T, G, M, V, 1>,
         args.in<G>(1) + attributes.first, parameter, master, args.out<M>(moments),
         args.out<V>(moments + 1), elements,
         AdamWScalarAddresses{args.in<double>(5), args.in<double>(6), args.in<int64_t>(7),
                              args.in<double>(8), args.in<int32_t>(9)},
         attributes);
}

// A moment in one of three dtypes, with its scales where it has any.
struct AnyMoment {
  void* data;
  uint8_t* scales;
  DType dtype;
  MomentDraw draw;
};

// The lanes of a warp that have one element each of the same block of 32, or none (`exists`).
// Every lane of the warp calls these together.
__device__ __forceinline__ float load_moment(const AnyMoment& moment, int64_t element,
                                             int64_t block, bool exists) {
  if (!exists) return 0;
  switch (moment.dtype) {
    case DType::f32:
      return static_cast<const float*>(moment.data)[element];
    case DType::bf16:
      return widen(static_cast<const Bf16*>(moment.data)[element]);
    default: {
      const float value =
          static_cast<const f8e4m3*>(moment.data)[element] * moment_scale(moment.scales[block]);
      return moment.draw == MomentDraw::square ? value * value : value;
    }
  }
}

// `draw`: the 20 random bits of the lane.
__device__ __forceinline__ void store_moment(const AnyMoment& moment, int64_t element,
                                             int64_t block, bool exists, uint32_t draw,
                                             float value) {
  if (moment.dtype != DType::f8e4m3) {
    if (!exists) return;
    if (moment.dtype == DType::f32) {
      static_cast<float*>(moment.data)[element] = value;
    } else {
      static_cast<Bf16*>(moment.data)[element] = round_to<Bf16>(value);
    }
    return;
  }
  const bool is_root = moment.draw == MomentDraw::square;
  if (is_root) value = sqrt(value);
  const float magnitude = fabsf(value);
  const uint32_t bits = exists ? __float_as_uint(magnitude) : 0;
  const uint8_t s = moment_scale_of(__reduce_max_sync(0xffffffffU, bits));
  if (!exists) return;
  const uint8_t drawn = draw_e4m3(magnitude * inverse_moment_scale(s), draw);
  const uint8_t least = is_root && magnitude > 0.0F ? 1 : 0;
  const uint8_t sign = signbit(value) ? 0x80 : 0;
  static_cast<f8e4m3*>(moment.data)[element].bits =
      static_cast<uint8_t>((drawn < least ? least : drawn) | sign);
  if (threadIdx.x % kMomentBlock == 0) moment.scales[block] = s;
}

// The 20 random bits of a lane: the words that adamw_cpu.cc draws.
__device__ __forceinline__ uint32_t draw_of_lane(int64_t step, MomentDraw which, uint32_t lane) {
  const RandomWords drawn = device_random_words(static_cast<uint64_t>(step), RandomStream::moments,
                                                static_cast<uint32_t>(which), lane / 4);
  return drawn.words[lane % 4] >> 12;
}

// Where a moment is in f8e4m3: a warp for each block of it, a lane for each element.
template <class T, class G>
__global__ void adamw_blocks_kernel(const G* gradient, T* parameter, float* master,
                                    AnyMoment exp_avg, AnyMoment exp_avg_sq, int64_t blocks,
                                    int64_t columns, AdamWScalarAddresses scalars,
                                    AdamWAttributes attributes) {
  if (*scalars.skip != 0) return;
  __shared__ DeviceAdamWFactors<float> shared;
  const DeviceAdamWFactors<float> factors = adamw_factors(scalars, attributes, shared);
  const uint32_t lane = threadIdx.x % kMomentBlock;
  const uint32_t mean_draw = draw_of_lane(*scalars.step, MomentDraw::mean, lane);
  const uint32_t square_draw = draw_of_lane(*scalars.step, MomentDraw::square, lane);
  const int64_t row_blocks = moment_blocks(columns);
  const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kMomentBlock);
  for (int64_t block = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kMomentBlock;
       block < blocks; block += warps) {
    const int64_t row = block / row_blocks;
    const int64_t column = (block - row * row_blocks) * kMomentBlock + lane;
    const bool exists = column < columns;
    const int64_t i = row * columns + column;
    const float clipped = exists ? widen(gradient[i]) * factors.clip : 0.0F;
    float average = load_moment(exp_avg, i, block, exists);
    average = average + factors.first_weight * (clipped - average);
    float square = load_moment(exp_avg_sq, i, block, exists);
    square = factors.second_decay * square + factors.second_weight * clipped * clipped;
    if (exists) {
      const float weight = factors.updated(master[i], average, square);
      master[i] = weight;
      if constexpr (!std::is_same_v<T, float>) {
        if (parameter != nullptr) parameter[i] = round_to<T>(weight);
      }
    }
    store_moment(exp_avg, i, block, exists, mean_draw, average);
    store_moment(exp_avg_sq, i, block, exists, square_draw, square);
  }
}

// T and G are the types of the parameter and of the gradient.
template <class T, class G>
void run_adamw_blocks(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<AdamWAttributes>();
  const bool has_parameter = args.in<T>(0) != nullptr;
  const int moments = has_parameter ? 1 : 0;
  const Shape& shape = args.output(moments).shape;
  const int64_t columns = shape.back();
  const int64_t blocks = shape.elements() / columns * moment_blocks(columns);
  T* parameter = has_parameter ? args.out<T>(0) + attributes.first : nullptr;
  int next_output = moments + 2;
  float* master = nullptr;
  if constexpr (std::is_same_v<T, float>) {
    master = parameter;
  } else {
    master = args.out<float>(next_output++);
  }
  const auto moment = [&](int output, int scale_input, MomentDraw draw) {
    const CudaTensor& tensor = args.output(output);
    const bool has_scales = tensor.dtype == DType::f8e4m3;
    TROUPE_CHECK(has_scales == (args.in<uint8_t>(scale_input) != nullptr), "scales of a moment");
    return AnyMoment{tensor.data, has_scales ? args.out<uint8_t>(next_output++) : nullptr,
                     tensor.dtype, draw};
  };
  const AnyMoment exp_avg = moment(moments, 10, MomentDraw::mean);
  const AnyMoment exp_avg_sq = moment(moments + 1, 11, MomentDraw::square);
  launch(args, {blocks_for(args, blocks, 256 / kMomentBlock), 256}, adamw_blocks_kernel<T, G>,
         args.in<G>(1) + attributes.first, parameter, master, exp_avg, exp_avg_sq, blocks, columns,
         AdamWScalarAddresses{args.in<double>(5), args.in<double>(6), args.in<int64_t>(7),
                              args.in<double>(8), args.in<int32_t>(9)},
         attributes);
}

template <class T, class G>
CudaKernel select_moments(const OpView& op) {
  const bool narrow_mean = op.input(2).dtype == DType::bf16;
  const bool narrow_square = op.input(3).dtype == DType::bf16;
  if (op.op.input_count > 10) return &run_adamw_blocks<T, G>;
  if (narrow_mean) {
    return narrow_square ? &run_adamw<T, G, Bf16, Bf16> : &run_adamw<T, G, Bf16, float>;
  }
  return narrow_square ? &run_adamw<T, G, float, Bf16> : &run_adamw<T, G, float, float>;
}

}  // namespace

CudaKernel adamw_cuda_kernel(const OpView& op) {
  switch (parameter_dtype(op, 0)) {
    case DType::f64:
      return &run_adamw<double, double, double, double>;
    case DType::f32:
      return select_moments<float, float>(op);
    case DType::f16:
      return select_moments<F16, float>(op);
    default:
      return op.input(1).dtype == DType::bf16 ? select_moments<Bf16, Bf16>(op)
                                              : select_moments<Bf16, float>(op);
  }
}

}  // namespace troupe
