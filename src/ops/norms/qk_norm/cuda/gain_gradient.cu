#include "ops/cuda/row_sums.cuh"
#include "ops/norms/qk_norm/cuda/heads.cuh"

namespace troupe {
namespace {

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

}  // namespace

CudaKernel qk_norm_rope_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
