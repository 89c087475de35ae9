#include "ops/attention/index_topk/index_scores.cuh"
#include "ops/attention/index_topk/index_topk.h"

namespace troupe {
namespace {

constexpr int kTopkThreads = 256;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

// Numbers in the order of the scores; NaN as the least.
__device__ __forceinline__ uint32_t ordered_bits(float score) {
  if (score != score) score = -infinity<float>();
  const auto bits = __float_as_uint(score + 0.0F);  // of both zeros the same
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffU : 0x80000000U);
}
__device__ __forceinline__ uint64_t ordered_bits(double score) {
  if (score != score) score = -infinity<double>();
  const auto bits = static_cast<uint64_t>(__double_as_longlong(score + 0.0));
  return bits ^ ((bits >> 63) != 0 ? ~uint64_t{0} : uint64_t{1} << 63);
}

// The number of threads before this one of the block for which `flag` holds, and of all of them.
struct FlagCount {
  int before;
  int all;
};
__device__ __forceinline__ FlagCount count_flags(bool flag) {
  __shared__ int of_warp[kTopkThreads / 32];
  const uint32_t votes = __ballot_sync(0xffffffffU, flag);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  if (lane == 0) of_warp[threadIdx.x / 32] = __popc(votes);
  __syncthreads();
  FlagCount count{__popc(votes & ((1U << lane) - 1)), 0};
  for (int i = 0; i < kTopkThreads / 32; ++i) {
    if (i < static_cast<int>(threadIdx.x) / 32) count.before += of_warp[i];
    count.all += of_warp[i];
  }
  return count;
}

// The `most`-th largest of the scores, as ordered bits, and how many are larger.
template <class Bits>
struct Threshold {
  Bits bits;
  int64_t larger;
};

// Digit by digit from the top: a histogram of the digits of those that agree in the ones before.
template <class A, class Bits = decltype(ordered_bits(A()))>
__device__ Threshold<Bits> find_threshold(const A* scores, int64_t count, int64_t most) {
  __shared__ int histogram[kDigits];
  __shared__ int digit_of;
  __shared__ int64_t larger_of;
  Bits found = 0;
  int64_t larger = 0;
  for (int shift = static_cast<int>(sizeof(Bits)) * 8 - kDigitBits; shift >= 0;
       shift -= kDigitBits) {
    const Bits above = shift + kDigitBits >= static_cast<int>(sizeof(Bits)) * 8
                           ? Bits(0)
                           : ~Bits(0) << (shift + kDigitBits);
    for_row(kDigits, [&](int64_t i) { histogram[i] = 0; });
    __syncthreads();
    for_row(count, [&](int64_t i) {
      const Bits bits = ordered_bits(scores[i]);
      if ((bits & above) == found) atomicAdd(&histogram[(bits >> shift) & (kDigits - 1)], 1);
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      int64_t before = larger;
      while (before + histogram[digit] < most) before += histogram[digit--];
      digit_of = digit;
      larger_of = before;
    }
    __syncthreads();
    found |= Bits(digit_of) << shift;
    larger = larger_of;
    __syncthreads();
  }
  return {found, larger};
}

// Each block takes one query after the other; `memory` has a row of scores for each block.
template <class T, int kStep>
__global__ void __launch_bounds__(kTopkThreads)
    index_topk_kernel(IndexCall<T> call, const int32_t* starts, int32_t* chosen, int64_t most,
                      accumulation_t<T>* memory) {
  using A = accumulation_t<T>;
  A* scores = memory + blockIdx.x * call.rows.sequence();
  for (int64_t query = blockIdx.x; query < call.rows.queries(); query += gridDim.x) {
    const KeyPositions visible = visible_positions(call.rows, starts, query);
    int32_t* row = chosen + query * most;
    if (visible.count <= most) {
      for_row(most, [&](int64_t i) {
        row[i] = i < visible.count ? static_cast<int32_t>(visible[i]) : -1;
      });
      continue;
    }
    __syncthreads();
    score_positions<kStep>(call, query, visible, scores);
    __syncthreads();
    const auto threshold = find_threshold(scores, visible.count, most);
    int64_t taken_before = 0;
    int64_t equal_before = 0;
    for (int64_t begin = 0; begin < visible.count && taken_before < most; begin += kTopkThreads) {
      const int64_t i = begin + threadIdx.x;
      const auto bits = i < visible.count ? ordered_bits(scores[i]) : 0;
      const bool equal = i < visible.count && bits == threshold.bits;
      const FlagCount equals = count_flags(equal);
      const bool taken =
          i < visible.count && (bits > threshold.bits ||
                                (equal && threshold.larger + equal_before + equals.before < most));
      const FlagCount takes = count_flags(taken);
      if (taken) row[taken_before + takes.before] = static_cast<int32_t>(visible[i]);
      equal_before += equals.all;
      taken_before += takes.all;
    }
  }
}

template <class T>
struct IndexTopkCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<IndexTopkAttributes>();
    const IndexCall<T> call(args, a.index);
    const bool packs = is_made_of_packs<T>(a.index.head_dim);
    launch(args, {index_blocks(a.index), kTopkThreads},
           packs ? index_topk_kernel<T, Pack<T>::kElements> : index_topk_kernel<T, 1>, call,
           args.in<int32_t>(3), args.out<int32_t>(0), a.most(),
           reinterpret_cast<accumulation_t<T>*>(args.scratch));
  }
};

}  // namespace

CudaKernel index_topk_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<IndexTopkCuda>(op.input(0).dtype);
}

}  // namespace troupe
