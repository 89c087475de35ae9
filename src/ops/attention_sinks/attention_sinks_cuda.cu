#include "ops/attention_sinks/attention_sinks.h"
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

// What one row adds to the gradient of a sink.
template <class T>
struct SinkTerm {
  using A = accumulation_t<T>;
  const T* d_out;
  const T* out;
  const A* lse;
  const A* sinks;
  int heads;
  int value_dim;
  int first;
  using Loaded = A;
  __device__ A load(int64_t row, int64_t sink) const {
    const auto head = static_cast<int>(sink) - first;
    if (head < 0 || head >= heads) return 0;
    const int64_t at = row * heads + head;
    A sum = 0;
    for (int i = 0; i < value_dim; ++i) {
      sum += widen(d_out[at * value_dim + i]) * widen(out[at * value_dim + i]);
    }
    return -exp(sinks[sink] - lse[at]) * sum;
  }
  __device__ void add(A term, A (&sums)[1]) const { sums[0] += term; }
};

template <class T>
struct AttentionSinkGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<AttentionSinkGradientAttributes>();
    const SinkTerm<T> term{.d_out = args.in<T>(0),
                           .out = args.in<T>(1),
                           .lse = args.in<A>(2),
                           .sinks = args.in<A>(3),
                           .heads = attributes.heads,
                           .value_dim = attributes.value_dim,
                           .first = attributes.first_sink};
    sum_row_steps<A, 1>(args, LiveRows(args.input(1)), args.input(3).shape[0], term, args.out<A>(0),
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
    default:
      return add_sinks<Bf16>(args, call);
  }
}

CudaKernel attention_sink_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<AttentionSinkGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
