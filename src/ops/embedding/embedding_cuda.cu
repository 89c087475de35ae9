#include "ops/cuda/device.cuh"
#include "ops/embedding/embedding.h"

namespace troupe {
namespace {

// A block for each token.
template <class T>
__global__ void embedding_kernel(const int32_t* tokens, const T* weight, T* y, int64_t vocabulary,
                                 int64_t hidden) {
  const int64_t token = tokens[blockIdx.x];
  const bool known = token >= 0 && token < vocabulary;
  const T* from = weight + token * hidden;
  T* to = y + int64_t{blockIdx.x} * hidden;
  if (hidden % Pack<T>::kElements == 0) {
    Pack<T> zero;
    for (T& value : zero.values) value = round_to<T>(0.0F);
    for_row(hidden / Pack<T>::kElements, [=](int64_t i) {
      store_pack(to + i * Pack<T>::kElements,
                 known ? load_pack(from + i * Pack<T>::kElements) : zero);
    });
    return;
  }
  for_row(hidden, [=](int64_t i) { to[i] = known ? from[i] : round_to<T>(0.0F); });
}

template <class T>
struct EmbeddingCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& weight = args.input(1).shape;
    launch(args,
           {static_cast<unsigned>(args.input(0).shape[0]),
            threads_for_row(weight[1], Pack<T>::kElements)},
           embedding_kernel<T>, args.in<int32_t>(0), args.in<T>(1), args.out<T>(0), weight[0],
           weight[1]);
  }
};

// The weight gradient needs, of each row of the table, the tokens that looked it up, in ascending
// order. These are chained: for each token the next one with the same id, and for each id its first
// token. Each row is then summed by one block that follows the chain.
//
// A block for each token: the least later token with the same id, and whether it is the first.
__global__ void chain_tokens_kernel(const int32_t* tokens, int32_t* next, int32_t* first,
                                    int64_t count, int64_t vocabulary, int32_t padding) {
  __shared__ int32_t least;
  __shared__ int32_t earlier;
  const int32_t own = static_cast<int32_t>(blockIdx.x);
  const int32_t id = tokens[own];
  if (id < 0 || id >= vocabulary || id == padding) return;  // the same for the whole block
  if (threadIdx.x == 0) {
    least = INT32_MAX;
    earlier = 0;
  }
  __syncthreads();
  for (int64_t t = threadIdx.x; t < count; t += blockDim.x) {
    if (tokens[t] != id) continue;
    if (t < own) {
      earlier = 1;  // whoever writes, writes the same
    } else if (t > own) {
      atomicMin(&least, static_cast<int32_t>(t));  // of integers: the order does not matter
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  next[own] = least == INT32_MAX ? -1 : least;
  if (earlier == 0) first[id] = own;
}

__global__ void clear_rows_kernel(int32_t* first, int64_t vocabulary) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < vocabulary) first[i] = -1;
}

template <class T, class Out>
__global__ void sum_tokens_kernel(const T* dy, const int32_t* next, const int32_t* first,
                                  Out* d_weight, int64_t hidden, bool accumulate) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  const int32_t begin = first[row];
  if (begin < 0 && accumulate) return;
  for_row(hidden, [=](int64_t i) {
    A sum = accumulate ? widen(d_weight[row * hidden + i]) : A(0);
    for (int32_t t = begin; t >= 0; t = next[t]) sum += widen(dy[t * hidden + i]);
    d_weight[row * hidden + i] = round_to<Out>(sum);
  });
}

// Out is the type of the gradient.
template <class T, class Out>
void run_weight_gradient(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<EmbeddingWeightGradientAttributes>();
  const int64_t vocabulary = attributes.vocabulary;
  const int64_t count = args.input(1).shape[0];
  const int64_t hidden = args.input(0).shape[1];
  auto* first = reinterpret_cast<int32_t*>(args.scratch);
  int32_t* next = first + vocabulary;
  launch(args, {static_cast<unsigned>(ceil_divide(vocabulary, 256)), 256}, clear_rows_kernel, first,
         vocabulary);
  launch(args, {static_cast<unsigned>(count), 256}, chain_tokens_kernel, args.in<int32_t>(1), next,
         first, count, vocabulary, attributes.padding_token);
  launch(args, {static_cast<unsigned>(vocabulary), threads_for_row(hidden, 4)},
         sum_tokens_kernel<T, Out>, args.in<T>(0), next, first, args.out<Out>(0), hidden,
         attributes.accumulate);
}

template <class T>
struct EmbeddingWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CudaKernel embedding_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<EmbeddingCuda>(op.output(0).dtype);
}

CudaKernel embedding_weight_gradient_cuda_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_weight_gradient<Bf16, Bf16>;
  return select_cuda_kernel<EmbeddingWeightGradientCuda>(op.input(0).dtype);
}

uint64_t embedding_weight_gradient_cuda_scratch_bytes(const OpView& op) {
  const int64_t vocabulary = op.attributes<EmbeddingWeightGradientAttributes>().vocabulary;
  return static_cast<uint64_t>(vocabulary + op.input(1).shape[0]) * sizeof(int32_t);
}

}  // namespace troupe
