#include "ops/norms/qk_norm/cuda/rounds.cuh"

namespace troupe {
namespace {

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
  const auto copy = [&](const QkRounds& own, uint4* to) {
    const int64_t at = own.row * width + own.head * heads.head_dim;
    copy_async(to, dy + at + step.low);
    copy_async(to + threads, dy + at + step.high);
    if (own.head < heads.normalized) {
      copy_async(to + 2 * threads, qkv + at + step.low);
      copy_async(to + 3 * threads, qkv + at + step.high);
    }
  };
  PairAngles<A, kStep> angles;
  const auto load_angles = [&](int64_t number) {
    const QkRounds own(heads, end, rounds, number);
    if (number < count && own.has_step && own.head < heads.normalized) {
      angles.load(heads.angles(table, own.row) + 2 * low_at);
    }
  };
  load_angles(blockIdx.x);
  int parity = 0;
  const auto body = [&](int64_t number, const QkRounds& own, const uint4* from) {
    const bool normalizes = own.has_step && own.head < heads.normalized;
    const bool is_query = own.head < heads.queries;
    T* to = d_qkv + own.row * width + own.head * heads.head_dim;
    A scale = 0;
    if (normalizes) {
      scale =
          rstd[kPerHead ? own.row * heads.normalized + own.head : own.row * 2 + (is_query ? 0 : 1)];
    }
    wait_for_async_copies();
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
  };
  for_each_round<2>(heads, end, rounds, count, staged, copy, body);
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

}  // namespace

CudaKernel qk_norm_rope_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
