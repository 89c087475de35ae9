#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/cuda/row_sums.cuh"

namespace troupe {
namespace {

// A block for each row. Shared memory: a factor of each head.
template <class T>
__global__ void add_sinks_kernel(T* out, accumulation_t<T>* lse, const accumulation_t<T>* sinks,
                                 int heads, int value_dim) {
  using A = accumulation_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  A* factors = reinterpret_cast<A*>(memory);
  const int64_t row = blockIdx.x;
  for (int head = static_cast<int>(threadIdx.x); head < heads;
       head += static_cast<int>(blockDim.x)) {
    const A of_keys = lse[row * heads + head];
    const A sink = sinks[head];
    const A larger = of_keys > sink ? of_keys : sink;
    const A of_all = larger + log(exp(of_keys - larger) + exp(sink - larger));
    lse[row * heads + head] = of_all;
    factors[head] = exp(of_keys - of_all);
  }
  __syncthreads();
  const int64_t elements = int64_t{heads} * value_dim;
  for (int64_t i = threadIdx.x; i < elements; i += blockDim.x) {
    T& value = out[row * elements + i];
    value = round_to<T>(widen(value) * factors[i / value_dim]);
  }
}

template <class T>
void add_sinks(const CudaKernelArguments& args, const SinkCall& call) {
  using A = accumulation_t<T>;
  launch(
      args,
      {static_cast<unsigned>(call.rows), threads_for_row(int64_t{call.heads} * call.value_dim, 4),
       sizeof(A) * static_cast<size_t>(call.heads)},
      add_sinks_kernel<T>, static_cast<T*>(call.out), static_cast<A*>(call.lse),
      static_cast<const A*>(call.sinks), call.heads, call.value_dim);
}

// What each row of a head adds to the gradient of its sink, as [T, H]: `lanes` threads for each, a
// power of two.
template <class T, int kStep>
__global__ void sink_terms_kernel(const T* d_out, const T* out, const accumulation_t<T>* lse,
                                  const accumulation_t<T>* sinks, accumulation_t<T>* terms,
                                  int64_t count, int heads, int value_dim, int lanes) {
  using A = accumulation_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t at = thread / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  A sum = 0;
  if (at < count) {
    for (int i = lane * kStep; i < value_dim; i += lanes * kStep) {
      const Pack<T> a = load_step<T, kStep>(d_out + at * value_dim + i);
      const Pack<T> c = load_step<T, kStep>(out + at * value_dim + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) sum += widen(a.values[j]) * widen(c.values[j]);
    }
  }
  for (int width = lanes / 2; width > 0; width /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, width);
  }
  if (lane == 0 && at < count) terms[at] = -exp(sinks[at % heads] - lse[at]) * sum;
}

// Terms by sink, of which only some are of heads.
template <class A>
struct SinkTerm {
  const A* terms;
  int heads;
  int first;
  using Loaded = A;
  __device__ A load(int64_t row, int64_t sink) const {
    const auto head = static_cast<int>(sink) - first;
    return head < 0 || head >= heads ? A(0) : terms[row * heads + head];
  }
  __device__ void add(A term, A (&sums)[1]) const { sums[0] += term; }
};

template <class T>
struct AttentionSinkGradientCuda {
  using A = accumulation_t<T>;

  template <int kStep>
  static void make_terms(const CudaKernelArguments& args,
                         const AttentionSinkGradientAttributes& attributes, A* terms) {
    constexpr int kThreads = 256;
    const int64_t count = args.input(2).shape.elements();
    int lanes = 1;
    while (lanes < 32 && lanes * kStep < attributes.value_dim) lanes *= 2;
    launch(args, {static_cast<unsigned>(ceil_divide(count * lanes, kThreads)), kThreads},
           sink_terms_kernel<T, kStep>, args.in<T>(0), args.in<T>(1), args.in<A>(2),
           args.in<A>(3) + attributes.first_sink, terms, count, attributes.heads,
           attributes.value_dim, lanes);
  }

  static void run(const CudaKernelArguments& args) {
    const auto& attributes = args.attributes->as<AttentionSinkGradientAttributes>();
    const int64_t sinks = args.input(3).shape[0];
    const LiveRows rows(args.input(1));
    A* const terms = reinterpret_cast<A*>(args.scratch) + row_sum_pieces(rows.bound, sinks) * sinks;
    if (is_made_of_packs<T>(attributes.value_dim)) {
      make_terms<Pack<T>::kElements>(args, attributes, terms);
    } else {
      make_terms<1>(args, attributes, terms);
    }
    sum_row_steps<A, 1>(args, rows, sinks,
                        SinkTerm<A>{terms, attributes.heads, attributes.first_sink}, args.out<A>(0),
                        attributes.accumulate);
  }
};

}  // namespace

void add_attention_sinks(const CudaKernelArguments& args, const SinkCall& call) {
  switch (call.dtype) {
    case DType::f64:
      return add_sinks<double>(args, call);
    case DType::f32:
      return add_sinks<float>(args, call);
    case DType::f16:
      return add_sinks<F16>(args, call);
    default:
      return add_sinks<Bf16>(args, call);
  }
}

CudaKernel attention_sink_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<AttentionSinkGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
