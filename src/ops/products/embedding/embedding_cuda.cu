#include "ops/products/embedding/embedding.h"
#include "program/cuda/raw_step.cuh"

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
// A block has kChainIds ids. It goes through all tokens, backwards in tiles: picks out its own ids'
// in order, finds the next one of each among these, or else the first one in the tiles that it has
// been through.
constexpr int kChainIds = 256;
constexpr int kChainThreads = 1024;
constexpr int kTokensOfThread = 4;
constexpr int kTile = kChainThreads * kTokensOfThread;

__global__ void __launch_bounds__(kChainThreads)
    chain_tokens_kernel(const int32_t* tokens, int32_t* next, int32_t* first, int64_t count,
                        int64_t vocabulary, int32_t padding) {
  constexpr int32_t kNone = INT32_MAX;
  __shared__ int32_t first_of[kChainIds];
  __shared__ int32_t found_ids[kTile];
  __shared__ int32_t found_tokens[kTile];
  __shared__ int found_by_warp[kChainThreads / 32];
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int64_t first_id = int64_t{blockIdx.x} * kChainIds;
  const int64_t left = vocabulary - first_id;
  const int64_t ids = left < kChainIds ? left : kChainIds;
  if (thread < kChainIds) first_of[thread] = kNone;
  for (int64_t tile = (count - 1) / kTile; tile >= 0; --tile) {
    const int64_t begin = tile * kTile + thread * kTokensOfThread;
    int64_t own[kTokensOfThread];
    int found = 0;
#pragma unroll
    for (int j = 0; j < kTokensOfThread; ++j) {
      const int32_t id = begin + j < count ? tokens[begin + j] : -1;
      own[j] = id >= first_id && id < first_id + ids && id != padding ? id - first_id : -1;
      found += own[j] >= 0 ? 1 : 0;
    }
    int up_to_here = found;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffU, up_to_here, distance);
      if (lane >= distance) up_to_here += before;
    }
    __syncthreads();  // the tile before has been read
    if (lane == 31) found_by_warp[warp] = up_to_here;
    __syncthreads();
    const int total = warp_sum(found_by_warp[lane]);
    int place = warp_sum(lane < warp ? found_by_warp[lane] : 0) + up_to_here - found;
#pragma unroll
    for (int j = 0; j < kTokensOfThread; ++j) {
      if (own[j] < 0) continue;
      found_ids[place] = static_cast<int32_t>(own[j]);
      found_tokens[place] = static_cast<int32_t>(begin + j);
      ++place;
    }
    __syncthreads();
    for (int i = thread; i < total; i += kChainThreads) {
      const int32_t id = found_ids[i];
      int32_t later = first_of[id];
      for (int k = i + 1; k < total; ++k) {
        if (found_ids[k] != id) continue;
        later = found_tokens[k];
        break;
      }
      next[found_tokens[i]] = later == kNone ? -1 : later;
    }
    __syncthreads();
    for (int i = thread; i < total; i += kChainThreads) {
      atomicMin(&first_of[found_ids[i]], found_tokens[i]);  // of integers: order does not matter
    }
  }
  __syncthreads();
  if (thread < ids) first[first_id + thread] = first_of[thread] == kNone ? -1 : first_of[thread];
}

// A block for each row of the table. When sums are added to what the table has: for each token, of
// which only the first one of its id has something to do. Out is the type of the gradient.
template <class T, class Out, int kStep>
__global__ void sum_tokens_kernel(const T* dy, const int32_t* tokens, const int32_t* next,
                                  const int32_t* first, Out* d_weight, int64_t hidden,
                                  int64_t vocabulary, bool accumulate) {
  using A = accumulation_t<T>;
  const int64_t row = accumulate ? tokens[blockIdx.x] : int64_t{blockIdx.x};
  if (row < 0 || row >= vocabulary) return;
  const int32_t begin = first[row];
  if (accumulate && begin != static_cast<int32_t>(blockIdx.x)) return;
  if (begin < 0) {  // as most are; side by side, unlike the steps below where Out is wider than T
    constexpr int kZeros = kStep == 1 ? 1 : Pack<Out>::kElements;
    Pack<Out> zeros;
    for (Out& zero : zeros.values) zero = round_to<Out>(0.0F);
    for_row_steps<kZeros>(
        hidden, [=](int64_t i) { store_step<Out, kZeros>(d_weight + row * hidden + i, zeros); });
    return;
  }
  for_row_steps<kStep>(hidden, [=](int64_t i) {
    Out* sums = d_weight + row * hidden + i;
    A sum[kStep] = {};
    if (accumulate) {
      Out earlier[kStep];
      load_numbers(sums, earlier);
#pragma unroll
      for (int j = 0; j < kStep; ++j) sum[j] = widen(earlier[j]);
    }
    for (int32_t t = begin; t >= 0; t = next[t]) {
      const Pack<T> pack = load_step<T, kStep>(dy + t * hidden + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) sum[j] += widen(pack.values[j]);
    }
    Out rounded[kStep];
#pragma unroll
    for (int j = 0; j < kStep; ++j) rounded[j] = round_to<Out>(sum[j]);
    store_numbers(rounded, sums);
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
  launch(args, {static_cast<unsigned>(ceil_divide(vocabulary, kChainIds)), kChainThreads},
         chain_tokens_kernel, args.in<int32_t>(1), next, first, count, vocabulary,
         attributes.padding_token);
  const bool packs = is_made_of_packs<T>(hidden);
  launch(args,
         {static_cast<unsigned>(attributes.accumulate ? count : vocabulary),
          threads_for_row(hidden, packs ? Pack<T>::kElements : 1)},
         packs ? sum_tokens_kernel<T, Out, Pack<T>::kElements> : sum_tokens_kernel<T, Out, 1>,
         args.in<T>(0), args.in<int32_t>(1), next, first, args.out<Out>(0), hidden, vocabulary,
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

}  // namespace troupe
