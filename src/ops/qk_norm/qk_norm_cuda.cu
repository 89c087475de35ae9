#include "ops/cuda/device.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/qk_norm/qk_norm.h"
#include "ops/qk_norm/qk_norm_cuda.h"

namespace troupe {
namespace {

// The vectors of a row that are normalised: those of the queries, then those of the keys.
struct DeviceQkVectors {
  template <class Heads>
  explicit DeviceQkVectors(const Heads& attributes)
      : per_head(attributes.scope == QkNormScope::head),
        count(per_head ? attributes.heads + attributes.groups : 2),
        queries(per_head ? attributes.heads : 1),
        head_dim(attributes.head_dim),
        query_elements(attributes.heads * attributes.head_dim),
        elements(query_elements + attributes.groups * attributes.head_dim) {}

  bool per_head;
  int count, queries, head_dim, query_elements, elements;

  __device__ bool is_query(int vector) const { return vector < queries; }
  __device__ int offset(int vector) const {
    return per_head ? vector * head_dim : vector * query_elements;
  }
  __device__ int size(int vector) const {
    if (per_head) return head_dim;
    return is_query(vector) ? query_elements : elements - query_elements;
  }
};

// A block for each row. Vectors of one head are taken by a group of lanes each, enough that each
// has one step if 32 suffice: `steps` is how many a head has. The two vectors of a projection
// are taken by the whole block, one after the other. `each(vector, first, stride, sum)` handles the
// steps first, first + stride, ... and sums over all who share the vector.
template <class A, class Each>
__device__ __forceinline__ void for_vectors(const DeviceQkVectors& vectors, int steps, A* shared,
                                            const Each& each) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (vectors.per_head) {
    int lanes = 32;
    while (lanes > 1 && lanes / 2 >= steps) lanes /= 2;
    const int first_lane = thread % 32 / lanes * lanes;
    const uint32_t group = (lanes == 32 ? 0xffffffffU : (1U << lanes) - 1U) << first_lane;
    const auto sum = [=](A value) {
      for (int width = lanes / 2; width > 0; width /= 2) {
        value += __shfl_xor_sync(group, value, width);
      }
      return value;
    };
    for (int i = thread / lanes; i < vectors.count; i += threads / lanes) {
      each(i, thread % lanes, lanes, sum);
    }
  } else {
    for (int i = 0; i < vectors.count; ++i) {
      each(i, thread, threads, [=](A value) { return block_sum(value, shared); });
    }
  }
}

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

// The result of a step that has been normalised: rounded, and turned before.
template <class T, int kStep>
struct PairResult {
  using A = accumulation_t<T>;
  __device__ __forceinline__ PairResult(const RawPair<T, kStep>& x, A scale,
                                        const PairGains<A, kStep>& gains,
                                        const PairAngles<A, kStep>& angles, bool turns)
      : low(unpack(x.low)), high(unpack(x.high)) {
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      const A a = widen(low.values[e]) * scale * gains.low[e];
      const A b = widen(high.values[e]) * scale * gains.high[e];
      low.values[e] = round_to<T>(turns ? a * angles.cosine(e) - b * angles.sine(e) : a);
      high.values[e] = round_to<T>(turns ? b * angles.cosine(e) + a * angles.sine(e) : b);
    }
  }
  Pack<T> low, high;
};

template <class T, int kStep>
__device__ __forceinline__ accumulation_t<T> sum_of_squares(const RawPair<T, kStep>& pair) {
  const Pack<T> low = unpack(pair.low);
  const Pack<T> high = unpack(pair.high);
  accumulation_t<T> total = 0;
#pragma unroll
  for (int e = 0; e < kStep; ++e) {
    total += widen(low.values[e]) * widen(low.values[e]);
    total += widen(high.values[e]) * widen(high.values[e]);
  }
  return total;
}

// What blocks go through whose threads have one step of a row at a time, and have it in shared
// memory before they need it: rows, or rounds of a row. It takes heads that turn as a whole, in
// steps of packs, one for each lane.
struct QkRounds {
  int64_t row;
  int head;
  bool has_step;

  __device__ QkRounds(const DeviceQkHeads& heads, int end, int rounds, int64_t number) {
    row = number;
    head = heads.group();
    if (rounds > 1) {
      row = number / rounds;
      head += static_cast<int>(number % rounds) * heads.groups();
    }
    has_step = heads.lane() < heads.steps && head < end;
  }
};

inline constexpr int kQkStages = 2;

__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
__device__ __forceinline__ void end_async_copies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
// For all but the last kQkStages - 1 groups of this thread.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kQkStages - 1) : "memory");
}

// y may be qkv: what a thread writes it alone has read.
template <class T, bool kPerHead>
__global__ void __launch_bounds__(kQkThreads, 3)
    qk_norm_rope_rounds_kernel(const T* qkv, const accumulation_t<T>* gamma_q,
                               const accumulation_t<T>* gamma_k, const accumulation_t<T>* table,
                               const accumulation_t<T>* squares, T* y, accumulation_t<T>* rstd,
                               LiveRows rows, DeviceQkHeads heads, QkNormAttributes attributes,
                               int end, int rounds) {
  using A = accumulation_t<T>;
  constexpr int kStep = Pack<T>::kElements;
  extern __shared__ uint4 staged[];  // [kQkStages][2][threads]
  __shared__ A shared[2][2][32];
  const auto threads = static_cast<int>(blockDim.x);
  const int64_t width = heads.width();
  const A offset = attributes.zero_centered ? A(1) : A(0);
  const int low_at = heads.lane() < heads.steps ? heads.lane() * kStep : 0;
  const QkStep step{low_at, low_at + heads.pairs, true, true};
  const int64_t count = rows.count() * rounds;
  const auto fetch = [&](int64_t number, int stage) {
    const QkRounds own(heads, end, rounds, number);
    if (number < count && own.has_step) {
      const T* head = qkv + own.row * width + own.head * heads.head_dim;
      uint4* to = staged + stage * 2 * threads + threadIdx.x;
      copy_async(to, head + step.low);
      copy_async(to + threads, head + step.high);
    }
    end_async_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kQkStages; ++stage) {
    fetch(blockIdx.x + int64_t{stage} * gridDim.x, stage);
  }
  int stage = 0;
  int parity = 0;
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const QkRounds own(heads, end, rounds, number);
    const bool normalizes = own.has_step && own.head < heads.normalized;
    PairAngles<A, kStep> angles;
    if (normalizes) angles.load(heads.angles(table, own.row) + 2 * low_at);
    wait_for_async_copies();
    RawPair<T, kStep> x{};
    if (own.has_step) {
      const uint4* from = staged + stage * 2 * threads + threadIdx.x;
      x.low.bits = from[0];
      x.high.bits = from[threads];
    }
    A scale;
    if constexpr (kPerHead) {
      const A total = heads.sum(sum_of_squares<T, kStep>(x));
      scale = reciprocal_root(total, heads.head_dim, attributes.epsilon);
      if (normalizes && heads.lane() == 0) rstd[own.row * heads.normalized + own.head] = scale;
    } else {
      const bool is_query = own.head < heads.queries;
      A totals[2];
      if (squares == nullptr) {
        const A total = normalizes ? sum_of_squares<T, kStep>(x) : A(0);
        totals[0] = is_query ? total : A(0);
        totals[1] = is_query ? A(0) : total;
        block_sums(totals, shared[parity]);
        parity ^= 1;
      } else {
        totals[0] = squares[own.row * 2];
        totals[1] = squares[own.row * 2 + 1];
      }
      const int of_vector = is_query ? heads.queries : heads.normalized - heads.queries;
      const int64_t ranks = squares == nullptr ? 1 : attributes.ranks;
      scale = reciprocal_root(is_query ? totals[0] : totals[1], ranks * of_vector * heads.head_dim,
                              attributes.epsilon);
      const bool is_first = own.head == 0 || own.head == heads.queries;
      if (is_first && heads.lane() == 0) rstd[own.row * 2 + (is_query ? 0 : 1)] = scale;
    }
    if (normalizes) {
      const PairGains<A, kStep> gains(heads.gain<kPerHead>(gamma_q, gamma_k, own.head), step,
                                      offset);
      const PairResult<T, kStep> result(x, scale, gains, angles, true);
      x.low.bits = __builtin_bit_cast(uint4, result.low);
      x.high.bits = __builtin_bit_cast(uint4, result.high);
    }
    if (own.has_step) {
      T* head = y + own.row * width + own.head * heads.head_dim;
      *reinterpret_cast<uint4*>(head + step.low) = x.low.bits;
      *reinterpret_cast<uint4*>(head + step.high) = x.high.bits;
    }
    fetch(number + int64_t{kQkStages} * gridDim.x, stage);
    stage = stage + 1 == kQkStages ? 0 : stage + 1;
  }
}

// Any heads: a block for each row, which is read twice. y may be qkv: what a thread writes it alone
// has read, and all have read before they sum.
template <class T, int kStep, bool kPerHead>
__global__ void __launch_bounds__(kQkThreads)
    qk_norm_rope_kernel(const T* qkv, const accumulation_t<T>* gamma_q,
                        const accumulation_t<T>* gamma_k, const accumulation_t<T>* table,
                        const accumulation_t<T>* squares, T* y, accumulation_t<T>* rstd,
                        LiveRows rows, DeviceQkHeads heads, QkNormAttributes attributes, int end) {
  using A = accumulation_t<T>;
  __shared__ A shared[2][32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const T* in = qkv + row * heads.width();
  T* out = y + row * heads.width();
  const A* table_row = heads.angles(table, row);
  const A offset = attributes.zero_centered ? A(1) : A(0);
  const auto squares_of = [&](int head) {
    A total = 0;
    for (int number = heads.lane(); number < heads.steps; number += heads.lanes()) {
      total += sum_of_squares<T, kStep>(
          load_pair<T, kStep>(in + head * heads.head_dim, heads.step<kStep>(number)));
    }
    return total;
  };
  const auto store = [&](int head, A scale) {
    const A* gain = heads.gain<kPerHead>(gamma_q, gamma_k, head);
    for (int number = heads.lane(); number < heads.steps; number += heads.lanes()) {
      const QkStep step = heads.step<kStep>(number);
      const RawPair<T, kStep> x = load_pair<T, kStep>(in + head * heads.head_dim, step);
      T* to = out + head * heads.head_dim;
      if (head >= heads.normalized) {
        store_pair<T, kStep>(to, step, unpack(x.low), unpack(x.high));
        continue;
      }
      PairAngles<A, kStep> angles;
      if (step.turns) angles.load(table_row + 2 * step.low);
      const PairGains<A, kStep> gains(gain, step, offset);
      const PairResult<T, kStep> result(x, scale, gains, angles, step.turns);
      store_pair<T, kStep>(to, step, result.low, result.high);
    }
  };
  if constexpr (kPerHead) {
    for (int first = 0; first < end; first += heads.groups()) {
      const int head = first + heads.group();
      const bool normalizes = head < heads.normalized;
      const A total = heads.sum(normalizes ? squares_of(head) : A(0));
      const A scale = reciprocal_root(total, heads.head_dim, attributes.epsilon);
      if (normalizes && heads.lane() == 0) rstd[row * heads.normalized + head] = scale;
      if (head < end) store(head, scale);
    }
  } else {
    A totals[2] = {};
    if (squares == nullptr) {
      for (int head = heads.group(); head < heads.normalized; head += heads.groups()) {
        const A total = squares_of(head);
        totals[0] += head < heads.queries ? total : A(0);
        totals[1] += head < heads.queries ? A(0) : total;
      }
      block_sums(totals, shared);
    } else {
      totals[0] = squares[row * 2];
      totals[1] = squares[row * 2 + 1];
    }
    const int64_t ranks = squares == nullptr ? 1 : attributes.ranks;
    const auto scale = [&](bool of_queries) {
      const int of_vector = of_queries ? heads.queries : heads.normalized - heads.queries;
      return reciprocal_root(of_queries ? totals[0] : totals[1], ranks * of_vector * heads.head_dim,
                             attributes.epsilon);
    };
    if (threadIdx.x < 2) rstd[row * 2 + threadIdx.x] = scale(threadIdx.x == 0);
    for (int head = heads.group(); head < end; head += heads.groups()) {
      store(head, scale(head < heads.queries));
    }
  }
}

// Launches Kernels::rounds<T, kPerHead>(), which stages steps of kTensors tensors, where the heads
// allow it, and else Kernels::any<T, kStep, kPerHead>().
template <class T, class Kernels, class... Values>
void launch_for_rows(const CudaKernelArguments& args, bool in_place, const Values&... values) {
  const auto& attributes = args.attributes->as<QkNormAttributes>();
  const bool packs = heads_are_made_of_packs(attributes, dtype_of<T>);
  constexpr int kPack = Pack<T>::kElements;
  const DeviceQkHeads heads(attributes, packs ? kPack : 1);
  const int64_t rows = args.input(0).shape[0];
  const bool per_head = attributes.scope == QkNormScope::head;
  const int end = in_place ? heads.normalized : heads.all;
  const unsigned threads = heads.threads(end);
  const int64_t rounds = heads.rounds(end);
  if (takes_rounds(attributes, QkSteps(attributes, packs ? kPack : 1), packs, end)) {
    const auto kernel =
        per_head ? Kernels::template rounds<T, true>() : Kernels::template rounds<T, false>();
    const size_t bytes = size_t{kQkStages} * Kernels::kTensors * 2 * threads * sizeof(uint4);
    allow_shared_bytes(kernel, bytes);
    launch(args, {blocks_for(args, rows * rounds, 1), threads, bytes}, kernel, values...,
           LiveRows(args.input(0)), heads, attributes, end, static_cast<int>(rounds));
    return;
  }
  const auto run = [&](auto kernel) {
    launch(args, {static_cast<unsigned>(rows), threads}, kernel, values..., LiveRows(args.input(0)),
           heads, attributes, end);
  };
  if (per_head) {
    run(packs ? Kernels::template any<T, kPack, true>() : Kernels::template any<T, 1, true>());
  } else {
    run(packs ? Kernels::template any<T, kPack, false>() : Kernels::template any<T, 1, false>());
  }
}

struct ForwardKernels {
  static constexpr int kTensors = 1;
  template <class T, bool kPerHead>
  static auto rounds() {
    return &qk_norm_rope_rounds_kernel<T, kPerHead>;
  }
  template <class T, int kStep, bool kPerHead>
  static auto any() {
    return &qk_norm_rope_kernel<T, kStep, kPerHead>;
  }
};

template <class T>
struct QkNormRopeCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    launch_for_rows<T, ForwardKernels>(args, args.in<T>(0) == args.out<T>(0), args.in<T>(0),
                                       args.in<A>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4),
                                       args.out<T>(0), args.out<A>(1));
  }
};

// Of a step: the gradient of the normalised elements over their scale, and the elements.
template <class T, int kStep>
struct PairGradient {
  using A = accumulation_t<T>;
  __device__ __forceinline__ PairGradient(const RawPair<T, kStep>& arrived,
                                          const RawPair<T, kStep>& pair,
                                          const PairAngles<A, kStep>& angles, bool turns,
                                          const PairGains<A, kStep>& gains)
      : turned(arrived, angles, turns), x(pair) {
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      turned.low[e] *= gains.low[e];
      turned.high[e] *= gains.high[e];
    }
  }
  // Its product with the elements.
  __device__ __forceinline__ A projection() const {
    const Pack<T> low = unpack(x.low);
    const Pack<T> high = unpack(x.high);
    A total = 0;
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      total += turned.low[e] * widen(low.values[e]);
      total += turned.high[e] * widen(high.values[e]);
    }
    return total;
  }
  __device__ __forceinline__ void store(T* head, const QkStep& step, A scale, A along) const {
    Pack<T> low = unpack(x.low);
    Pack<T> high = unpack(x.high);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      low.values[e] = round_to<T>(scale * turned.low[e] - along * widen(low.values[e]));
      high.values[e] = round_to<T>(scale * turned.high[e] - along * widen(high.values[e]));
    }
    store_pair<T, kStep>(head, step, low, high);
  }
  TurnedBack<T, kStep> turned;
  RawPair<T, kStep> x;
};

// What a vector's gradient loses along its elements, if its product with them is `projection`.
template <class A>
__device__ __forceinline__ A gradient_along(A scale, A projection, int64_t elements) {
  return scale * scale * scale * projection / static_cast<A>(elements);
}

// As qk_norm_rope_rounds_kernel; d_qkv may be dy.
template <class T, bool kPerHead>
__global__ void __launch_bounds__(kQkThreads, 2)
    qk_norm_rope_gradient_rounds_kernel(const T* dy, const T* qkv, const accumulation_t<T>* gamma_q,
                                        const accumulation_t<T>* gamma_k,
                                        const accumulation_t<T>* table,
                                        const accumulation_t<T>* rstd, T* d_qkv,
                                        accumulation_t<T>* d_squares, LiveRows rows,
                                        DeviceQkHeads heads, QkNormAttributes attributes, int end,
                                        int rounds) {
  using A = accumulation_t<T>;
  constexpr int kStep = Pack<T>::kElements;
  extern __shared__ uint4 staged[];  // [kQkStages][4][threads]
  __shared__ A shared[2][2][32];
  const auto threads = static_cast<int>(blockDim.x);
  const int64_t width = heads.width();
  const A offset = attributes.zero_centered ? A(1) : A(0);
  const int low_at = heads.lane() < heads.steps ? heads.lane() * kStep : 0;
  const QkStep step{low_at, low_at + heads.pairs, true, true};
  const int64_t count = rows.count() * rounds;
  const auto fetch = [&](int64_t number, int stage) {
    const QkRounds own(heads, end, rounds, number);
    if (number < count && own.has_step) {
      const int64_t at = own.row * width + own.head * heads.head_dim;
      uint4* to = staged + stage * 4 * threads + threadIdx.x;
      copy_async(to, dy + at + step.low);
      copy_async(to + threads, dy + at + step.high);
      if (own.head < heads.normalized) {
        copy_async(to + 2 * threads, qkv + at + step.low);
        copy_async(to + 3 * threads, qkv + at + step.high);
      }
    }
    end_async_copies();
  };
  PairAngles<A, kStep> angles;
  const auto load_angles = [&](int64_t number) {
    const QkRounds own(heads, end, rounds, number);
    if (number < count && own.has_step && own.head < heads.normalized) {
      angles.load(heads.angles(table, own.row) + 2 * low_at);
    }
  };
#pragma unroll
  for (int stage = 0; stage < kQkStages; ++stage) {
    fetch(blockIdx.x + int64_t{stage} * gridDim.x, stage);
  }
  load_angles(blockIdx.x);
  int stage = 0;
  int parity = 0;
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    const QkRounds own(heads, end, rounds, number);
    const bool normalizes = own.has_step && own.head < heads.normalized;
    const bool is_query = own.head < heads.queries;
    T* to = d_qkv + own.row * width + own.head * heads.head_dim;
    A scale = 0;
    if (normalizes) {
      scale =
          rstd[kPerHead ? own.row * heads.normalized + own.head : own.row * 2 + (is_query ? 0 : 1)];
    }
    wait_for_async_copies();
    const uint4* from = staged + stage * 4 * threads + threadIdx.x;
    RawPair<T, kStep> d{};
    RawPair<T, kStep> x{};
    if (own.has_step) {
      d.low.bits = from[0];
      d.high.bits = from[threads];
    }
    if (normalizes) {
      x.low.bits = from[2 * threads];
      x.high.bits = from[3 * threads];
    }
    // Values' heads are at the end of a row, or there are none.
    const int gain_head = normalizes ? own.head : 0;
    const PairGains<A, kStep> gains(heads.gain<kPerHead>(gamma_q, gamma_k, gain_head), step,
                                    offset);
    const PairGradient<T, kStep> gradient(d, x, angles, true, gains);
    load_angles(number + gridDim.x);
    const A projection = normalizes ? gradient.projection() : A(0);
    A along = 0;
    if constexpr (kPerHead) {
      along = gradient_along(scale, heads.sum(projection), heads.head_dim);
    } else {
      A totals[2] = {is_query ? projection : A(0), is_query ? A(0) : projection};
      block_sums(totals, shared[parity]);
      parity ^= 1;
      const int of_vector = is_query ? heads.queries : heads.normalized - heads.queries;
      const int64_t elements = int64_t{of_vector} * heads.head_dim;
      const A total = is_query ? totals[0] : totals[1];
      if (d_squares == nullptr) {
        along = gradient_along(scale, total, elements);
      } else if ((own.head == 0 || own.head == heads.queries) && heads.lane() == 0) {
        d_squares[own.row * 2 + (is_query ? 0 : 1)] =
            -gradient_along(scale, total, 2 * elements * attributes.ranks);
      }
    }
    if (normalizes) {
      gradient.store(to, step, scale, along);
    } else if (own.has_step) {
      *reinterpret_cast<uint4*>(to + step.low) = d.low.bits;
      *reinterpret_cast<uint4*>(to + step.high) = d.high.bits;
    }
    fetch(number + int64_t{kQkStages} * gridDim.x, stage);
    stage = stage + 1 == kQkStages ? 0 : stage + 1;
  }
}

// As qk_norm_rope_kernel; d_qkv may be dy.
template <class T, int kStep, bool kPerHead>
__global__ void __launch_bounds__(kQkThreads)
    qk_norm_rope_gradient_kernel(const T* dy, const T* qkv, const accumulation_t<T>* gamma_q,
                                 const accumulation_t<T>* gamma_k, const accumulation_t<T>* table,
                                 const accumulation_t<T>* rstd, T* d_qkv,
                                 accumulation_t<T>* d_squares, LiveRows rows, DeviceQkHeads heads,
                                 QkNormAttributes attributes, int end) {
  using A = accumulation_t<T>;
  __shared__ A shared[2][32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const T* d = dy + row * heads.width();
  const T* x = qkv + row * heads.width();
  T* out = d_qkv + row * heads.width();
  const A* table_row = heads.angles(table, row);
  const A offset = attributes.zero_centered ? A(1) : A(0);
  const auto for_steps = [&](int head, const auto& body) {
    const int64_t at = int64_t{head} * heads.head_dim;
    const A* gain = heads.gain<kPerHead>(gamma_q, gamma_k, head);
    for (int number = heads.lane(); number < heads.steps; number += heads.lanes()) {
      const QkStep step = heads.step<kStep>(number);
      PairAngles<A, kStep> angles;
      if (step.turns) angles.load(table_row + 2 * step.low);
      body(step, PairGradient<T, kStep>(load_pair<T, kStep>(d + at, step),
                                        load_pair<T, kStep>(x + at, step), angles, step.turns,
                                        PairGains<A, kStep>(gain, step, offset)));
    }
  };
  const auto projection_of = [&](int head) {
    A total = 0;
    for_steps(head, [&](const QkStep&, const PairGradient<T, kStep>& gradient) {
      total += gradient.projection();
    });
    return total;
  };
  const auto store = [&](int head, A scale, A along) {
    for_steps(head, [&](const QkStep& step, const PairGradient<T, kStep>& gradient) {
      gradient.store(out + head * heads.head_dim, step, scale, along);
    });
  };
  if constexpr (kPerHead) {
    for (int first = 0; first < heads.normalized; first += heads.groups()) {
      const int head = first + heads.group();
      const bool normalizes = head < heads.normalized;
      const A scale = normalizes ? rstd[row * heads.normalized + head] : A(0);
      const A projection = heads.sum(normalizes ? projection_of(head) : A(0));
      if (normalizes) store(head, scale, gradient_along(scale, projection, heads.head_dim));
    }
  } else {
    A totals[2] = {};
    for (int head = heads.group(); head < heads.normalized; head += heads.groups()) {
      const A total = projection_of(head);
      totals[0] += head < heads.queries ? total : A(0);
      totals[1] += head < heads.queries ? A(0) : total;
    }
    block_sums(totals, shared);
    const auto along = [&](bool of_queries, int64_t factor) {
      const int of_vector = of_queries ? heads.queries : heads.normalized - heads.queries;
      return gradient_along(rstd[row * 2 + (of_queries ? 0 : 1)],
                            of_queries ? totals[0] : totals[1],
                            factor * of_vector * heads.head_dim);
    };
    if (d_squares != nullptr && threadIdx.x < 2) {
      d_squares[row * 2 + threadIdx.x] = -along(threadIdx.x == 0, int64_t{2} * attributes.ranks);
    }
    for (int head = heads.group(); head < heads.normalized; head += heads.groups()) {
      const bool is_query = head < heads.queries;
      store(head, rstd[row * 2 + (is_query ? 0 : 1)],
            d_squares != nullptr ? A(0) : along(is_query, 1));
    }
  }
  for (int64_t i = int64_t{heads.normalized} * heads.head_dim + threadIdx.x * kStep;
       i < int64_t{end} * heads.head_dim; i += int64_t{blockDim.x} * kStep) {
    store_step<T, kStep>(out + i, load_step<T, kStep>(d + i));
  }
}

struct GradientKernels {
  static constexpr int kTensors = 2;
  template <class T, bool kPerHead>
  static auto rounds() {
    return &qk_norm_rope_gradient_rounds_kernel<T, kPerHead>;
  }
  template <class T, int kStep, bool kPerHead>
  static auto any() {
    return &qk_norm_rope_gradient_kernel<T, kStep, kPerHead>;
  }
};

template <class T>
struct QkNormRopeGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    A* d_squares = args.input(6).data != nullptr ? args.out<A>(1) : nullptr;
    launch_for_rows<T, GradientKernels>(args, args.in<T>(0) == args.out<T>(0), args.in<T>(0),
                                        args.in<T>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4),
                                        args.in<A>(5), args.out<T>(0), d_squares);
  }
};

// The vectors whose elements a gain multiplies: `count` of every row, from `first` on.
struct QkGainVectors {
  int first, count;  // vectors of a row
  int stride;        // elements from one vector of a row to the next
  int begin;         // element at which the first one begins
  int all;           // vectors of a row that have a scale
};

inline constexpr int kGainLoads = 2;  // vectors of a thread that are on their way at once

// Sums over a piece of the vectors (row_sums.cuh): a block has blockDim.x steps of the gain and
// blockDim.y vectors at a time. `n`: elements of the gain.
template <class T, int kStep>
__global__ void __launch_bounds__(kSumThreads, 2)
    qk_gain_pieces_kernel(const T* dy, const T* qkv, const accumulation_t<T>* table,
                          const accumulation_t<T>* rstd, LiveRows rows, int64_t piece_vectors,
                          int64_t n, DeviceQkHeads heads, QkGainVectors vectors,
                          accumulation_t<T>* partial) {
  using A = accumulation_t<T>;
  struct Loaded {
    RawPair<T, kStep> d, x;
    PairAngles<A, kStep> angles;
    A scale;
  };
  constexpr int kSums = 2 * kStep;
  __shared__ A shared[kSumThreads * kSums];
  const auto width = static_cast<int>(blockDim.x);
  const auto height = static_cast<int>(blockDim.y);
  const int gain_steps = static_cast<int>(n) / heads.head_dim * heads.steps;
  // Of the step of column x of the block.
  const auto step_of = [&](int x) {
    const int number = static_cast<int>(blockIdx.x) * width + x;
    QkStep step = heads.step<kStep>(number % heads.steps);
    step.low += number / heads.steps * heads.head_dim;
    step.high += number / heads.steps * heads.head_dim;
    return step;
  };
  const bool has_step = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) < gain_steps;
  const QkStep step = step_of(static_cast<int>(threadIdx.x));
  const int angle = 2 * (step.low % heads.head_dim);
  const int64_t begin = int64_t{blockIdx.y} * piece_vectors;
  const int64_t live = rows.count() * vectors.count;
  const int64_t end = begin + piece_vectors < live ? begin + piece_vectors : live;
  A sums[kSums] = {};
  // The next vector: its number in all, its row, and which one of the row's.
  int64_t number = begin + threadIdx.y;
  auto row = static_cast<uint32_t>(number / vectors.count);
  auto of_row = static_cast<int>(number % vectors.count);
  const int row_stride = height / vectors.count;
  const int of_row_stride = height % vectors.count;
  const auto load = [&] {
    const int64_t at =
        row * heads.width() + vectors.begin + static_cast<int64_t>(of_row) * vectors.stride;
    Loaded loaded;
    loaded.d = load_pair<T, kStep>(dy + at, step);
    loaded.x = load_pair<T, kStep>(qkv + at, step);
    loaded.scale = rstd[int64_t{row} * vectors.all + vectors.first + of_row];
    if (step.turns) loaded.angles.load(heads.angles(table, row) + angle);
    return loaded;
  };
  // Beyond the last vector it is loaded once more, and not added.
  const auto advance = [&] {
    number += height;
    if (number >= end) return;
    row += row_stride;
    of_row += of_row_stride;
    if (of_row >= vectors.count) {
      of_row -= vectors.count;
      ++row;
    }
  };
  const auto add = [&](const Loaded& loaded) {
    const TurnedBack<T, kStep> turned(loaded.d, loaded.angles, step.turns);
    const Pack<T> x_low = unpack(loaded.x.low);
    const Pack<T> x_high = unpack(loaded.x.high);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      sums[e] += turned.low[e] * widen(x_low.values[e]) * loaded.scale;
      sums[kStep + e] += turned.high[e] * widen(x_high.values[e]) * loaded.scale;
    }
  };
  if (has_step) {
    while (number < end) {
      Loaded loaded[kGainLoads];
      bool is_live[kGainLoads];
#pragma unroll
      for (int i = 0; i < kGainLoads; ++i) {
        is_live[i] = number < end;
        loaded[i] = load();
        advance();
      }
#pragma unroll
      for (int i = 0; i < kGainLoads; ++i) {
        if (is_live[i]) add(loaded[i]);
      }
    }
  }
  store_piece(sums, shared, partial + int64_t{blockIdx.y} * n, [=](int x, int j) -> int64_t {
    const QkStep of_sum = step_of(x);
    if (static_cast<int>(blockIdx.x) * width + x >= gain_steps) return -1;
    if (j < kStep) return of_sum.low + j;
    return of_sum.has_high ? of_sum.high + j - kStep : -1;
  });
}

template <class T>
struct QkNormRopeWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormWeightGradientAttributes>();
    const bool per_head = attributes.scope == QkNormScope::head;
    const bool packs = heads_are_made_of_packs(attributes, dtype_of<T>);
    const DeviceQkHeads heads(attributes, packs ? Pack<T>::kElements : 1);
    const QkGainVectors vectors{
        .first = per_head || attributes.first_head == 0 ? attributes.first_head : 1,
        .count = per_head ? attributes.head_count : 1,
        .stride = attributes.head_dim,
        .begin = attributes.first_head * attributes.head_dim,
        .all = per_head ? heads.normalized : 2};
    const LiveRows rows(args.input(0));
    const int64_t n = args.output(0).shape.elements();
    const int64_t pieces = row_sum_pieces(rows.bound * vectors.count, n);
    const int64_t steps = n / heads.head_dim * heads.steps;
    const dim3 block = sum_block(steps);
    auto* partial = reinterpret_cast<A*>(args.scratch);
    launch(args,
           {dim3(static_cast<unsigned>(ceil_divide(steps, block.x)), static_cast<unsigned>(pieces)),
            block},
           packs ? qk_gain_pieces_kernel<T, Pack<T>::kElements> : qk_gain_pieces_kernel<T, 1>,
           args.in<T>(0), args.in<T>(1), args.in<A>(2), args.in<A>(3), rows,
           ceil_divide(rows.bound * vectors.count, pieces), n, heads, vectors, partial);
    add_pieces(args, partial, pieces, n, args.out<A>(0), attributes.accumulate);
  }
};

template <class T>
__global__ void qk_squares_kernel(const T* qkv, accumulation_t<T>* squares, LiveRows rows,
                                  int64_t width, DeviceQkVectors vectors) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  for_vectors(vectors, vectors.head_dim, shared,
              [&](int i, int first, int stride, const auto& sum) {
                const T* x = qkv + row * width + vectors.offset(i);
                A total = 0;
                for (int j = first; j < vectors.size(i); j += stride)
                  total += widen(x[j]) * widen(x[j]);
                total = sum(total);
                if (first == 0) squares[row * vectors.count + i] = total;
              });
}

template <class T>
struct QkSquaresCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    launch(args, {static_cast<unsigned>(shape[0]), 256}, qk_squares_kernel<T>, args.in<T>(0),
           args.out<accumulation_t<T>>(0), LiveRows(args.input(0)), shape[1],
           DeviceQkVectors(args.attributes->as<QkNormAttributes>()));
  }
};

template <class T>
__global__ void qk_squares_gradient_kernel(const accumulation_t<T>* d_squares, const T* qkv,
                                           T* d_qkv, LiveRows rows, int64_t width,
                                           DeviceQkVectors vectors) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  for_row(width, [=](int64_t j) {
    A gradient = 0;
    if (j < vectors.elements) {
      const int64_t i =
          vectors.per_head ? j / vectors.head_dim : (j < vectors.query_elements ? 0 : 1);
      gradient = A(2) * d_squares[row * vectors.count + i] * widen(qkv[row * width + j]);
    }
    d_qkv[row * width + j] = round_to<T>(gradient);
  });
}

template <class T>
struct QkSquaresGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(1).shape;
    launch(args, {static_cast<unsigned>(shape[0]), 256}, qk_squares_gradient_kernel<T>,
           args.in<accumulation_t<T>>(0), args.in<T>(1), args.out<T>(0), LiveRows(args.input(1)),
           shape[1], DeviceQkVectors(args.attributes->as<QkNormAttributes>()));
  }
};

}  // namespace

CudaKernel qk_norm_rope_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_rope_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeGradientCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_rope_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeWeightGradientCuda>(op.input(0).dtype);
}

CudaKernel qk_squares_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresCuda>(op.input(0).dtype);
}

CudaKernel qk_squares_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
