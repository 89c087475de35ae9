#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/causal_conv/causal_conv_pieces.h"
#include "ops/cuda/row_sums.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kConvThreads = 128;

// What the kernels read.
template <class T>
struct ConvOperands {
  const T* x;
  const accumulation_t<T>* w;
  const int32_t* starts;
  const T* before;
  int64_t rows;
  int64_t columns;
  int64_t sequence;
  int taps;

  ConvOperands(const CudaKernelArguments& args, int first)
      : x(args.in<T>(first)),
        w(args.in<accumulation_t<T>>(first + 1)),
        starts(args.in<int32_t>(first + 2)),
        before(args.in<T>(first + 3)),
        rows(args.input(first).shape[0]),
        columns(args.input(first).shape[1]),
        sequence(args.attributes->as<CausalConvAttributes>().sequence),
        taps(static_cast<int>(args.input(first + 1).shape[1])) {}
};

// One column of the operands, which a thread walks along, and its taps: the last kTaps rows of x up
// to the current one in registers, of which each is read once. Without kBefore no rows before a
// sequence are given, and the registers hold those of the sequence before, which do not count.
template <class T, int kTaps, bool kBefore>
struct ConvColumn {
  using A = accumulation_t<T>;
  const T* x;
  const int32_t* starts;
  const T* before;
  int64_t rows;
  int64_t columns;
  int64_t column;
  int sequence;
  int unused;        // of the taps, the first ones
  int position = 0;  // of the current row in its sequence
  A w[kTaps];
  A window[kTaps] = {};

  __device__ explicit ConvColumn(const ConvOperands<T>& of)
      : x(of.x),
        starts(of.starts),
        before(of.before),
        rows(of.rows),
        columns(of.columns),
        column(int64_t{blockIdx.x} * blockDim.x + threadIdx.x),
        sequence(static_cast<int>(of.sequence)),
        unused(kTaps - of.taps) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      w[j] = j >= unused && column < columns ? of.w[column * of.taps + j - unused] : A(0);
    }
  }

  __device__ A load(int64_t row) const {
    return row >= 0 && row < rows ? widen(x[row * columns + column]) : A(0);
  }
  // Rows before a sequence that are given.
  __device__ int earlier() const {
    return kBefore ? kTaps - unused - 1 : 0;
  }
  // The row of `before` that is so far before the sequence of `row`.
  __device__ int64_t earlier_row(int64_t row, int distance) const {
    return (row / sequence + 1) * earlier() - distance;
  }
  // What is `back` rows before the current row `row`.
  __device__ A element(int64_t row, int back) const {
    if (!kBefore || back <= position) return load(row - back);
    const int distance = back - position;
    if (row >= rows || distance > earlier()) return A(0);
    return widen(before[earlier_row(row, distance) * columns + column]);
  }
  __device__ void begin_at(int64_t row) {
    position = static_cast<int>(row % sequence);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) window[j] = element(row, kTaps - 1 - j);
  }
  __device__ void go_down(int64_t to) {
    position = position + 1 == sequence ? 0 : position + 1;
    if (kBefore && position == 0) {
      begin_at(to);
      return;
    }
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) window[j] = window[j + 1];
    window[kTaps - 1] = load(to);
  }
  __device__ void go_up(int64_t to) {
    position = position == 0 ? sequence - 1 : position - 1;
    if (kBefore && position == sequence - 1) {
      if (to >= 0) begin_at(to);
      return;
    }
#pragma unroll
    for (int j = kTaps - 1; j > 0; --j) window[j] = window[j - 1];
    window[0] = element(to, kTaps - 1);
  }
  // Rows before the current one that it may read.
  __device__ int depth(int64_t row) const {
    return static_cast<int>(rows_seen(row, position, earlier(), starts));
  }
  __device__ bool reads(int tap, int depth) const {
    return tap >= unused && kTaps - 1 - tap <= depth;
  }

  // p of the current row.
  __device__ A convolve(int depth) const {
    A p = 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (reads(j, depth)) p += w[j] * window[j];
    }
    return p;
  }
  // dp of it.
  __device__ A differentiate(A dy, int depth) const {
    const A p = convolve(depth);
    const A s = sigmoid(p);
    return dy * s * (A(1) + p * (A(1) - s));
  }
};

// A thread for each column and kConvPieceRows rows.
template <class T, int kTaps, bool kBefore>
__global__ void causal_conv_kernel(ConvOperands<T> of, T* y) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps, kBefore> conv(of);
  const int64_t rows = of.rows;
  if (conv.column >= of.columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  conv.begin_at(first);
#pragma unroll 4
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const A p = conv.convolve(conv.depth(row));
    y[row * of.columns + conv.column] = round_to<T>(p * sigmoid(p));
    conv.go_down(row + 1);
  }
}

// Goes up, with dp of the rows that read the current one, the nearest first.
template <class T, int kTaps, bool kBefore>
__global__ void causal_conv_gradient_kernel(const T* dy, ConvOperands<T> of, T* dx, T* d_before) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps, kBefore> conv(of);
  const int64_t rows = of.rows;
  const int64_t columns = of.columns;
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  const int64_t last = (first + kConvPieceRows < rows ? first + kConvPieceRows : rows) - 1;
  A later[kTaps] = {};
  int depths[kTaps] = {};
  conv.begin_at(last + kTaps - 1);
#pragma unroll 4
  for (int64_t row = last + kTaps - 1; row >= first; --row) {
#pragma unroll
    for (int j = kTaps - 1; j > 0; --j) {
      later[j] = later[j - 1];
      depths[j] = depths[j - 1];
    }
    depths[0] = row < rows ? conv.depth(row) : -1;
    later[0] =
        row < rows ? conv.differentiate(widen(dy[row * columns + conv.column]), depths[0]) : A(0);
    const int position = conv.position;
    conv.go_up(row - 1);
    if (row > last) continue;
    A sum = 0;
#pragma unroll
    for (int ahead = 0; ahead < kTaps; ++ahead) {
      const int tap = kTaps - 1 - ahead;
      const bool is_other = kBefore && position + ahead >= conv.sequence;  // of the next sequence
      if (!is_other && conv.reads(tap, depths[ahead])) sum += conv.w[tap] * later[ahead];
    }
    dx[row * columns + conv.column] = round_to<T>(sum);
    if constexpr (kBefore) {
      if (position > 0) continue;
#pragma unroll
      for (int distance = 1; distance < kTaps; ++distance) {
        if (distance > conv.earlier()) continue;
        A sum_before = 0;
#pragma unroll
        for (int back = distance; back < kTaps; ++back) {
          const int reader = back - distance;
          const int tap = kTaps - 1 - back;
          if (reader < conv.sequence && conv.reads(tap, depths[reader])) {
            sum_before += conv.w[tap] * later[reader];
          }
        }
        d_before[conv.earlier_row(row, distance) * columns + conv.column] = round_to<T>(sum_before);
      }
    }
  }
}

// `partial` has [pieces, columns, taps].
template <class T, int kTaps, bool kBefore>
__global__ void causal_conv_weight_gradient_kernel(const T* dy, ConvOperands<T> of,
                                                   accumulation_t<T>* partial) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps, kBefore> conv(of);
  const int64_t rows = of.rows;
  if (conv.column >= of.columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  A sums[kTaps] = {};
  conv.begin_at(first);
#pragma unroll 4
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const int depth = conv.depth(row);
    const A dp = conv.differentiate(widen(dy[row * of.columns + conv.column]), depth);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (conv.reads(j, depth)) sums[j] += dp * conv.window[j];
    }
    conv.go_down(row + 1);
  }
  A* to = partial + (int64_t{blockIdx.y} * of.columns + conv.column) * of.taps;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    if (j >= conv.unused) to[j - conv.unused] = sums[j];
  }
}

Launch conv_launch(const Shape& x) {
  return {dim3(static_cast<unsigned>(ceil_divide(x[1], kConvThreads)),
               static_cast<unsigned>(conv_pieces(x[0]))),
          kConvThreads};
}

// Kernels for few taps, as most models have, and for any number.
constexpr int kFewTaps = 4;

// Calls run<taps, whether rows before a sequence are given>().
template <class T, class Run>
void with_kernel(const ConvOperands<T>& of, const Run& run) {
  if (of.taps <= kFewTaps) {
    of.before == nullptr ? run.template operator()<kFewTaps, false>()
                         : run.template operator()<kFewTaps, true>();
  } else {
    of.before == nullptr ? run.template operator()<kMostTaps, false>()
                         : run.template operator()<kMostTaps, true>();
  }
}

template <class T>
struct CausalConvCuda {
  static void run(const CudaKernelArguments& args) {
    const ConvOperands<T> of(args, 0);
    with_kernel(of, [&]<int kTaps, bool kBefore>() {
      launch(args, conv_launch(args.input(0).shape), causal_conv_kernel<T, kTaps, kBefore>, of,
             args.out<T>(0));
    });
  }
};

template <class T>
struct CausalConvGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const ConvOperands<T> of(args, 1);
    T* const d_before = of.before == nullptr ? nullptr : args.out<T>(1);
    with_kernel(of, [&]<int kTaps, bool kBefore>() {
      launch(args, conv_launch(args.input(1).shape), causal_conv_gradient_kernel<T, kTaps, kBefore>,
             args.in<T>(0), of, args.out<T>(0), d_before);
    });
  }
};

template <class T>
struct CausalConvWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const ConvOperands<T> of(args, 1);
    const Shape& x = args.input(1).shape;
    auto* partial = reinterpret_cast<A*>(args.scratch);
    with_kernel(of, [&]<int kTaps, bool kBefore>() {
      launch(args, conv_launch(x), causal_conv_weight_gradient_kernel<T, kTaps, kBefore>,
             args.in<T>(0), of, partial);
    });
    add_pieces(args, partial, conv_pieces(x[0]), args.input(2).shape.elements(), args.out<A>(0),
               args.attributes->as<CausalConvAttributes>().accumulate);
  }
};

}  // namespace

CudaKernel causal_conv_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CausalConvCuda>(op.input(0).dtype);
}

CudaKernel causal_conv_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CausalConvGradientCuda>(op.input(0).dtype);
}

CudaKernel causal_conv_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<CausalConvWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
