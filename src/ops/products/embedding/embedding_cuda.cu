#include "ops/products/embedding/embedding.h"
#include "program/cuda/raw_step.cuh"
#include "program/cuda/warp_scan.cuh"

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
// order: `listed` has all tokens, those of each id together, and `ends` where each id's end. Each
// row is then summed by one block. A list tells which rows to load long before they are summed,
// which counts where one id has many tokens: a vocabulary of bytes, the commonest words.
//
// A block has kListedIds ids. It counts its own tokens and those of smaller ids, which come first.
// Then it goes through all tokens in tiles and picks out its own, in order; of these a warp finds
// the places, 32 tokens at a time.
constexpr int kListedIds = 256;
constexpr int kListThreads = 1024;
constexpr int kTokensOfThread = 4;
constexpr int kTile = kListThreads * kTokensOfThread;

__global__ void __launch_bounds__(kListThreads)
    list_tokens_kernel(const int32_t* tokens, int32_t* listed, int32_t* ends, int64_t count,
                       int64_t vocabulary, int32_t padding) {
  constexpr int kIdsOfLane = kListedIds / 32;
  __shared__ int32_t places[kListedIds];  // tokens of each id; then where the next one goes
  __shared__ int32_t smaller;
  __shared__ int32_t found_ids[kTile];
  __shared__ int32_t found_tokens[kTile];
  __shared__ int found_by_warp[kListThreads / 32];
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int64_t first_id = int64_t{blockIdx.x} * kListedIds;
  const int64_t left = vocabulary - first_id;
  const int64_t ids = left < kListedIds ? left : kListedIds;
  if (thread < kListedIds) places[thread] = 0;
  if (thread == 0) smaller = 0;
  __syncthreads();
  int32_t smaller_of_thread = 0;
  for (int64_t i = thread; i < count; i += kListThreads) {
    const int32_t id = tokens[i];
    if (id < 0 || id == padding || id >= first_id + ids) continue;
    if (id < first_id) {
      ++smaller_of_thread;
    } else {
      atomicAdd(&places[id - first_id], 1);  // of integers: order does not matter
    }
  }
  smaller_of_thread = warp_sum(smaller_of_thread);
  if (lane == 0) atomicAdd(&smaller, smaller_of_thread);
  __syncthreads();
  if (warp == 0) {
    int32_t of_lane = 0;
    for (int j = 0; j < kIdsOfLane; ++j) of_lane += places[lane * kIdsOfLane + j];
    int32_t place = smaller + warp_prefix_sum(of_lane) - of_lane;
    for (int j = 0; j < kIdsOfLane; ++j) {
      const int id = lane * kIdsOfLane + j;
      const int32_t tokens_of_id = places[id];
      places[id] = place;
      place += tokens_of_id;
      if (id < ids) ends[first_id + id] = place;
    }
  }
  for (int64_t tile = 0; tile * kTile < count; ++tile) {
    const int64_t begin = tile * kTile + thread * kTokensOfThread;
    int64_t own[kTokensOfThread];
    int found = 0;
#pragma unroll
    for (int j = 0; j < kTokensOfThread; ++j) {
      const int32_t id = begin + j < count ? tokens[begin + j] : -1;
      own[j] = id >= first_id && id < first_id + ids && id != padding ? id - first_id : -1;
      found += own[j] >= 0 ? 1 : 0;
    }
    const int up_to_here = warp_prefix_sum(found);
    __syncthreads();  // the tile before has been listed
    if (lane == 31) found_by_warp[warp] = up_to_here;
    __syncthreads();
    const int total = warp_sum(found_by_warp[lane]);
    int index = warp_sum(lane < warp ? found_by_warp[lane] : 0) + up_to_here - found;
#pragma unroll
    for (int j = 0; j < kTokensOfThread; ++j) {
      if (own[j] < 0) continue;
      found_ids[index] = static_cast<int32_t>(own[j]);
      found_tokens[index] = static_cast<int32_t>(begin + j);
      ++index;
    }
    __syncthreads();
    if (warp != 0) continue;
    for (int i = lane; i - lane < total; i += 32) {
      const bool is_token = i < total;
      const int32_t id = is_token ? found_ids[i] : -1;
      const unsigned same = __match_any_sync(0xffffffffU, id);
      const int before = __popc(same & ((1U << lane) - 1));
      if (is_token) listed[places[id] + before] = found_tokens[i];
      __syncwarp();
      if (is_token && before == 0) places[id] += __popc(same);
      __syncwarp();
    }
  }
}

// A block for each row of the table. When sums are added to what the table has: for each token, of
// which only the first one of its id has something to do. Out is the type of the gradient.
constexpr int kRowsAhead = 8;  // that are on their way at once

template <class T, class Out, int kStep>
__global__ void sum_tokens_kernel(const T* dy, const int32_t* tokens, const int32_t* listed,
                                  const int32_t* ends, Out* d_weight, int64_t hidden,
                                  int64_t vocabulary, bool accumulate) {
  using A = accumulation_t<T>;
  const int64_t row = accumulate ? tokens[blockIdx.x] : int64_t{blockIdx.x};
  if (row < 0 || row >= vocabulary) return;
  const int32_t begin = row == 0 ? 0 : ends[row - 1];
  const int32_t end = ends[row];
  if (accumulate && (begin == end || listed[begin] != static_cast<int32_t>(blockIdx.x))) return;
  if (begin ==
      end) {  // as most are; side by side, unlike the steps below where Out is wider than T
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
    for (int32_t first = begin; first < end; first += kRowsAhead) {
      RawStep<T, kStep> steps[kRowsAhead];
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        if (first + k < end) steps[k] = load_raw<T, kStep>(dy + listed[first + k] * hidden + i);
      }
#pragma unroll
      for (int k = 0; k < kRowsAhead; ++k) {
        if (first + k >= end) break;
        const Pack<T> pack = unpack<T, kStep>(steps[k]);
#pragma unroll
        for (int j = 0; j < kStep; ++j) sum[j] += widen(pack.values[j]);
      }
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
  auto* ends = reinterpret_cast<int32_t*>(args.scratch);
  int32_t* listed = ends + vocabulary;
  launch(args, {static_cast<unsigned>(ceil_divide(vocabulary, kListedIds)), kListThreads},
         list_tokens_kernel, args.in<int32_t>(1), listed, ends, count, vocabulary,
         attributes.padding_token);
  const bool packs = is_made_of_packs<T>(hidden);
  launch(args,
         {static_cast<unsigned>(attributes.accumulate ? count : vocabulary),
          threads_for_row(hidden, packs ? Pack<T>::kElements : 1)},
         packs ? sum_tokens_kernel<T, Out, Pack<T>::kElements> : sum_tokens_kernel<T, Out, 1>,
         args.in<T>(0), args.in<int32_t>(1), listed, ends, args.out<Out>(0), hidden, vocabulary,
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
