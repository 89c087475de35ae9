// How the CUDA kernels of qk_norm see a row: its heads, cut into steps, and what a thread has of a
// step. Private to this folder.
#pragma once

#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/qk_norm/qk_norm_cuda.h"
#include "program/cuda/device.cuh"
#include "program/cuda/raw_step.cuh"

namespace troupe {

// The elements of a step of a head: kStep from `low` and kStep from `high` on. Those that turn do
// so in pairs, by the angles low, low + 1, ...; the last step of those that do not may lack the
// second half.
struct QkStep {
  int low, high;
  bool turns, has_high;
};

// The heads of a row, cut into steps. `lanes` threads side by side share a head, enough that each
// has one step if 32 suffice; a block has as many heads at a time as it has such groups.
struct DeviceQkHeads {
  template <class Attributes>
  DeviceQkHeads(const Attributes& attributes, int step_elements)
      : queries(attributes.heads),
        normalized(queries + attributes.groups),
        all(normalized + attributes.groups),
        head_dim(attributes.head_dim),
        pairs(attributes.rotary_dim / 2),
        sequence(static_cast<uint32_t>(attributes.sequence)) {
    const QkSteps cut(attributes, step_elements);
    pair_steps = cut.pair_steps;
    steps = cut.steps;
    lane_bits = cut.lane_bits;
  }

  int queries, normalized, all;  // heads: of queries, of keys besides, of values besides
  int head_dim, pairs;
  uint32_t sequence;
  int pair_steps, steps;
  int lane_bits = 0;  // 1 << lane_bits lanes

  // Threads that a block has for the first `heads` heads of a row, in `rounds(heads)` rounds.
  int64_t rounds(int heads) const { return ceil_divide(int64_t{heads} << lane_bits, kQkThreads); }
  unsigned threads(int heads) const {
    return static_cast<unsigned>(ceil_divide(ceil_divide(heads, rounds(heads)) << lane_bits, 32) *
                                 32);
  }
  __device__ int lanes() const { return 1 << lane_bits; }
  __device__ int group() const { return static_cast<int>(threadIdx.x) >> lane_bits; }
  __device__ int groups() const { return static_cast<int>(blockDim.x) >> lane_bits; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  __device__ int64_t width() const { return int64_t{all} * head_dim; }
  template <int kStep>
  __device__ QkStep step(int number) const {
    if (number < pair_steps) return {number * kStep, number * kStep + pairs, true, true};
    const int low = 2 * pairs + (number - pair_steps) * 2 * kStep;
    return {low, low + kStep, false, low + kStep < head_dim};
  }
  // Cosine and sine of each pair of the row; rows can be counted with 32 bits.
  template <class A>
  __device__ const A* angles(const A* table, int64_t row) const {
    return table + int64_t{static_cast<uint32_t>(row) % sequence} * (2 * pairs);
  }
  // Where a gain begins that a head has.
  template <bool kPerHead, class A>
  __device__ const A* gain(const A* gamma_q, const A* gamma_k, int head) const {
    const bool is_query = head < queries;
    const A* gain = is_query ? gamma_q : gamma_k;
    return kPerHead ? gain : gain + (is_query ? head : head - queries) * head_dim;
  }
  // Over the threads that share a head; all threads of the warp take part.
  template <class A>
  __device__ __forceinline__ A sum(A value) const {
    for (int width = lanes() / 2; width > 0; width /= 2) {
      value += __shfl_xor_sync(0xffffffffU, value, width);
    }
    return value;
  }
};

// A step as it lies in memory; what it lacks is zero.
template <class T, int kStep>
struct RawPair {
  RawStep<T, kStep> low, high;
};
template <class T, int kStep>
__device__ __forceinline__ RawPair<T, kStep> load_pair(const T* head, const QkStep& step) {
  return {load_raw<T, kStep>(head + step.low),
          step.has_high ? load_raw<T, kStep>(head + step.high) : RawStep<T, kStep>()};
}
template <class T, int kStep>
__device__ __forceinline__ void store_pair(T* head, const QkStep& step, const Pack<T>& low,
                                           const Pack<T>& high) {
  store_step<T, kStep>(head + step.low, low);
  if (step.has_high) store_step<T, kStep>(head + step.high, high);
}

// The gains of a step, with what is added to them.
template <class A, int kStep>
struct PairGains {
  __device__ __forceinline__ PairGains(const A* gains, const QkStep& step, A offset) {
    load_numbers(gains + step.low, low);
#pragma unroll
    for (int e = 0; e < kStep; ++e) high[e] = 0;
    if (step.has_high) load_numbers(gains + step.high, high);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      low[e] += offset;
      high[e] += offset;
    }
  }
  A low[kStep], high[kStep];
};

// Cosines and sines of a step, as they lie in the table.
template <class A, int kStep>
struct PairAngles {
  __device__ __forceinline__ void load(const A* from) {
    if constexpr (kStep == 1) {
      numbers[0] = from[0];
      numbers[1] = from[1];
    } else {
      load_numbers(from, numbers);
    }
  }
  __device__ A cosine(int e) const { return numbers[2 * e]; }
  __device__ A sine(int e) const { return numbers[2 * e + 1]; }
  A numbers[2 * kStep];
};

// A step of gradients before it turned.
template <class T, int kStep>
struct TurnedBack {
  using A = accumulation_t<T>;
  __device__ __forceinline__ TurnedBack(const RawPair<T, kStep>& pair,
                                        const PairAngles<A, kStep>& angles, bool turns) {
    const Pack<T> from_low = unpack(pair.low);
    const Pack<T> from_high = unpack(pair.high);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      low[e] = widen(from_low.values[e]);
      high[e] = widen(from_high.values[e]);
    }
    if (!turns) return;
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      const A a = low[e];
      const A b = high[e];
      low[e] = a * angles.cosine(e) + b * angles.sine(e);
      high[e] = b * angles.cosine(e) - a * angles.sine(e);
    }
  }
  A low[kStep], high[kStep];
};

// Sums over the block; between two uses of the same `shared` all of it synchronise.
template <class A>
__device__ __forceinline__ void block_sums(A (&values)[2], A (&shared)[2][32]) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[i] = warp_sum(values[i]);
    if (lane == 0) shared[i][warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[i] = warp_sum(lane < static_cast<int>(blockDim.x) / 32 ? shared[i][lane] : A(0));
  }
}

template <class A>
__device__ __forceinline__ A reciprocal_root(A squares, int64_t terms, double epsilon) {
  return A(1) / sqrt(squares / static_cast<A>(terms) + static_cast<A>(epsilon));
}

}  // namespace troupe
