#include "ops/elementwise/activation/activation.cuh"
#include "ops/exchange/coded_rows/coded_block.cuh"
#include "program/cuda/raw_step.cuh"

namespace troupe {
namespace {

// A step of a coded row, in bytes of its own.
template <int kStep>
struct CodedStep {
  uint64_t codes;
  uint8_t scale;
};

// As it lies in memory.
template <int kStep>
using CodeWord =
    std::conditional_t<kStep == 8, uint64_t, std::conditional_t<kStep == 4, uint32_t, uint16_t>>;

// A step from element i of a row of `width`, as it is or coded.
template <class T, int kStep>
__device__ __forceinline__ RawStep<T, kStep> load_input(const T* row, int64_t i, int64_t) {
  return load_raw<T, kStep>(row + i);
}
template <class T, int kStep>
__device__ __forceinline__ CodedStep<kStep> load_input(const uint8_t* row, int64_t i,
                                                       int64_t width) {
  return {*reinterpret_cast<const CodeWord<kStep>*>(row + i), row[width + i / kCodedBlock]};
}

template <class T, int kStep>
__device__ __forceinline__ Pack<T> unpack_input(const RawStep<T, kStep>& step) {
  return unpack(step);
}
template <class T, int kStep>
__device__ __forceinline__ Pack<T> unpack_input(const CodedStep<kStep>& step) {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < kStep; ++j) pack.values[j] = decode_element<T>(step.codes, j, step.scale);
  return pack;
}

// Writes a step of a coded row; all threads that have one of its block call it.
template <class T, int kStep>
__device__ __forceinline__ void store_coded(uint8_t* row, int64_t i, int64_t width,
                                            const Pack<T>& step) {
  float values[kStep];
#pragma unroll
  for (int j = 0; j < kStep; ++j) values[j] = static_cast<float>(widen(step.values[j]));
  uint8_t scale;
  *reinterpret_cast<CodeWord<kStep>*>(row + i) =
      static_cast<CodeWord<kStep>>(encode_step(values, &scale));
  if (i % kCodedBlock == 0) row[width + i / kCodedBlock] = scale;
}

// A step of a row, as it lies in memory: an element without gate has it in place of the gate.
template <class Input, class D>
struct ActivationStep {
  Input gate, up;
  D d;
};
struct Nothing {};

// Calls body(i, step) for the first elements i of this thread's steps of a row. Each step is on its
// way while the one before is worked on, and the first one before `prepare()`.
template <int kStep, class Load, class Prepare, class Body>
__device__ __forceinline__ void for_loaded_steps(int64_t n, const Load& load,
                                                 const Prepare& prepare, const Body& body) {
  const int64_t stride = int64_t{blockDim.x} * kStep;
  int64_t i = int64_t{threadIdx.x} * kStep;
  auto step = load(i < n ? i : 0);
  prepare();
  while (i < n) {
    auto next = step;
    if (i + stride < n) next = load(i + stride);
    body(i, step);
    step = next;
    i += stride;
  }
}

// A block for each row that is expected; where more have come, blocks take further ones. The bounds
// are those of registers (32 and 64): with more, too few loads are under way to keep memory busy.
template <class T, int kStep, ActivationFunction function, bool kStores = false>
__global__ void __launch_bounds__(kMostRowThreads, kStores ? 4 : 8)
    activation_kernel(const T* x, RowWeights<accumulation_t<T>> weights, T* y, uint8_t* stored,
                      LiveRows rows, int64_t f, bool gated, Halves<accumulation_t<T>> halves) {
  using A = accumulation_t<T>;
  const int64_t count = rows.count();
  const int64_t width = gated ? 2 * f : f;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const T* in = x + row * width;
    T* out = y + row * f;
    uint8_t* coded = kStores ? stored + row * coded_row_bytes(width) : nullptr;
    int64_t slot = 0;
    A weight = 0;
    for_loaded_steps<kStep>(
        f,
        [=](int64_t i) {
          ActivationStep<RawStep<T, kStep>, Nothing> step{};
          step.gate = load_raw<T, kStep>(in + i);
          if (gated) step.up = load_raw<T, kStep>(in + f + i);
          return step;
        },
        [&] {
          slot = weights.slot(row);
          weight = weights.of_slot(slot);
        },
        [&](int64_t i, const ActivationStep<RawStep<T, kStep>, Nothing>& step) {
          const Pack<T> gate = unpack(step.gate);
          const Pack<T> up = unpack(step.up);
          store_step<T, kStep>(
              out + i, activate_step<function, T, kStep>(gate, up, gated, halves, slot, weight));
          if constexpr (kStores) {
            if (slot < 0) return;
            store_coded<T, kStep>(coded, i, width, gate);
            if (gated) store_coded<T, kStep>(coded, f + i, width, up);
          }
        });
    if constexpr (kStores) {
      if (slot < 0) continue;
      const int64_t padding = width + width / kCodedBlock + threadIdx.x;
      if (padding < coded_row_bytes(width)) coded[padding] = 0;  // 15 bytes at most
    }
  }
}

// x: rows of T, or coded ones. dx may be x of T: each element of a row is read before it is
// written, and by the same thread.
template <class T, int kStep, ActivationFunction function, class X = T>
__global__ void __launch_bounds__(kMostRowThreads, 4)
    activation_gradient_kernel(const X* x, const T* dy, RowWeights<accumulation_t<T>> weights,
                               T* dx, accumulation_t<T>* d_weights, LiveRows rows, int64_t f,
                               bool gated, Halves<accumulation_t<T>> halves) {
  using A = accumulation_t<T>;
  using Input = decltype(load_input<T, kStep>(x, 0, 0));
  using Step = ActivationStep<Input, RawStep<T, kStep>>;
  __shared__ A shared[32];
  const int64_t count = rows.count();
  const int64_t width = gated ? 2 * f : f;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const X* in = x + row * (std::is_same_v<X, T> ? width : coded_row_bytes(width));
    const T* d_out = dy + row * f;
    T* d_in = dx + row * width;
    int64_t slot = 0;
    A weight = 0;
    A sum = 0;
    for_loaded_steps<kStep>(
        f,
        [=](int64_t i) {
          Step step{};
          step.gate = load_input<T, kStep>(in, i, width);
          if (gated) step.up = load_input<T, kStep>(in, f + i, width);
          step.d = load_raw<T, kStep>(d_out + i);
          return step;
        },
        [&] {
          slot = weights.slot(row);
          weight = weights.of_slot(slot);
        },
        [&](int64_t i, const Step& step) {
          const Pack<T> gates = unpack_input<T, kStep>(step.gate);
          const Pack<T> ups = unpack_input<T, kStep>(step.up);
          const Pack<T> ds = unpack(step.d);
          Pack<T> d_gate;
          Pack<T> d_up;
          differentiate_step<function, T, kStep>(gates, ups, ds, gated, halves, slot, weight,
                                                 d_gate, d_up, sum);
          store_step<T, kStep>(d_in + i, d_gate);
          if (gated) store_step<T, kStep>(d_in + f + i, d_up);
        });
    if (d_weights == nullptr || slot < 0) continue;
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) d_weights[slot] = sum;
    if (row + gridDim.x < count) __syncthreads();  // before `shared` is used again
  }
}

template <class T>
struct ActivationCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const Shape& y = args.output(0).shape;
    constexpr int kPack = Pack<T>::kElements;
    const bool packs = is_made_of_packs<T>(y[1]);
    with_function(attributes.function, [&](auto function) {
      constexpr ActivationFunction kFunction = decltype(function)::value;
      const LiveRows rows(args.input(0));
      auto* kernel =
          packs ? activation_kernel<T, kPack, kFunction> : activation_kernel<T, 1, kFunction>;
      if (attributes.stores_input) kernel = activation_kernel<T, kPack, kFunction, true>;
      launch(args, {static_cast<unsigned>(rows.expected), threads_for_row(y[1], packs ? kPack : 1)},
             kernel, args.in<T>(0), row_weights<A>(args, 1), args.out<T>(0),
             attributes.stores_input ? args.out<uint8_t>(1) : nullptr, rows, y[1], attributes.gated,
             Halves<A>(attributes));
    });
  }
};

template <class T>
struct ActivationGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<ActivationAttributes>();
    const Shape& dy = args.input(1).shape;
    constexpr int kPack = Pack<T>::kElements;
    const bool packs = is_made_of_packs<T>(dy[1]);
    A* d_weights = nullptr;
    if (args.in<A>(2) != nullptr) {
      d_weights = args.out<A>(1);  // slots without a row get 0
      clear(args, d_weights, static_cast<size_t>(args.output(1).shape.elements()) * sizeof(A));
    }
    with_function(attributes.function, [&](auto function) {
      constexpr ActivationFunction kFunction = decltype(function)::value;
      const LiveRows rows(args.input(1));
      const Launch grid{static_cast<unsigned>(rows.expected),
                        threads_for_row(dy[1], packs ? kPack : 1)};
      const auto run_on = [&](auto* kernel, const auto* x) {
        launch(args, grid, kernel, x, args.in<T>(1), row_weights<A>(args, 2), args.out<T>(0),
               d_weights, rows, dy[1], attributes.gated, Halves<A>(attributes));
      };
      if (attributes.stores_input) {
        run_on(activation_gradient_kernel<T, kPack, kFunction, uint8_t>, args.in<uint8_t>(4));
      } else if (packs) {
        run_on(activation_gradient_kernel<T, kPack, kFunction>, args.in<T>(0));
      } else {
        run_on(activation_gradient_kernel<T, 1, kFunction>, args.in<T>(0));
      }
    });
  }
};

}  // namespace

CudaKernel activation_cuda_kernel_of(DType dtype) {
  return select_cuda_kernel<ActivationCuda>(dtype);
}

CudaKernel activation_cuda_kernel(const OpView& op) {
  return activation_cuda_kernel_of(op.output(0).dtype);
}

CudaKernel activation_gradient_cuda_kernel_of(DType dtype) {
  return select_cuda_kernel<ActivationGradientCuda>(dtype);
}

CudaKernel activation_gradient_cuda_kernel(const OpView& op) {
  return activation_gradient_cuda_kernel_of(op.output(0).dtype);
}

}  // namespace troupe
