#include "ops/norms/qk_norm/cuda/rounds.cuh"

namespace troupe {
namespace {

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
  const auto copy = [&](const QkRounds& own, uint4* to) {
    const T* head = qkv + own.row * width + own.head * heads.head_dim;
    copy_async(to, head + step.low);
    copy_async(to + threads, head + step.high);
  };
  int parity = 0;
  const auto body = [&](int64_t, const QkRounds& own, const uint4* from) {
    const bool normalizes = own.has_step && own.head < heads.normalized;
    PairAngles<A, kStep> angles;
    if (normalizes) angles.load(heads.angles(table, own.row) + 2 * low_at);
    wait_for_async_copies();
    RawPair<T, kStep> x{};
    if (own.has_step) {
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
  };
  for_each_round<1>(heads, end, rounds, count, staged, copy, body);
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

}  // namespace

CudaKernel qk_norm_rope_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeCuda>(op.output(0).dtype);
}

}  // namespace troupe
