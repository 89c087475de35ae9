#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/causal_conv/causal_conv_pieces.h"
#include "ops/cuda/row_sums.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kConvThreads = 128;

// One column of the operands, which a thread walks along, and its taps: the last kTaps rows of x up
// to the current one in registers, of which each is read once.
template <class T, int kTaps>
struct ConvColumn {
  using A = accumulation_t<T>;
  const T* x;
  const int32_t* starts;
  int64_t rows;
  int64_t columns;
  int64_t column;
  int sequence;
  int unused;        // of the taps, the first ones
  int position = 0;  // of the current row in its sequence
  A w[kTaps];
  A window[kTaps] = {};

  __device__ ConvColumn(const T* x, const A* weight, const int32_t* starts, int64_t rows,
                        int64_t columns, int64_t sequence, int taps)
      : x(x),
        starts(starts),
        rows(rows),
        columns(columns),
        column(int64_t{blockIdx.x} * blockDim.x + threadIdx.x),
        sequence(static_cast<int>(sequence)),
        unused(kTaps - taps) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      w[j] = j >= unused && column < columns ? weight[column * taps + j - unused] : A(0);
    }
  }

  __device__ A load(int64_t row) const {
    return row >= 0 && row < rows ? widen(x[row * columns + column]) : A(0);
  }
  __device__ void begin_at(int64_t row) {
    position = static_cast<int>(row % sequence);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) window[j] = load(row - kTaps + 1 + j);
  }
  __device__ void go_down(int64_t to) {
    position = position + 1 == sequence ? 0 : position + 1;
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) window[j] = window[j + 1];
    window[kTaps - 1] = load(to);
  }
  __device__ void go_up(int64_t to) {
    position = position == 0 ? sequence - 1 : position - 1;
#pragma unroll
    for (int j = kTaps - 1; j > 0; --j) window[j] = window[j - 1];
    window[0] = load(to - kTaps + 1);
  }
  // Rows before the current one that it may read.
  __device__ int depth(int64_t row) const {
    return starts == nullptr ? position : position - starts[row];
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
template <class T, int kTaps>
__global__ void causal_conv_kernel(const T* x, const accumulation_t<T>* w, const int32_t* starts,
                                   T* y, int64_t rows, int64_t columns, int64_t sequence,
                                   int taps) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps> conv(x, w, starts, rows, columns, sequence, taps);
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  conv.begin_at(first);
#pragma unroll 4
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const A p = conv.convolve(conv.depth(row));
    y[row * columns + conv.column] = round_to<T>(p * sigmoid(p));
    conv.go_down(row + 1);
  }
}

// Goes up, with dp of the rows that read the current one, the nearest first.
template <class T, int kTaps>
__global__ void causal_conv_gradient_kernel(const T* dy, const T* x, const accumulation_t<T>* w,
                                            const int32_t* starts, T* dx, int64_t rows,
                                            int64_t columns, int64_t sequence, int taps) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps> conv(x, w, starts, rows, columns, sequence, taps);
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
    conv.go_up(row - 1);
    if (row > last) continue;
    A sum = 0;
#pragma unroll
    for (int ahead = 0; ahead < kTaps; ++ahead) {
      const int tap = kTaps - 1 - ahead;
      if (conv.reads(tap, depths[ahead])) sum += conv.w[tap] * later[ahead];
    }
    dx[row * columns + conv.column] = round_to<T>(sum);
  }
}

// `partial` has [pieces, columns, taps].
template <class T, int kTaps>
__global__ void causal_conv_weight_gradient_kernel(const T* dy, const T* x,
                                                   const accumulation_t<T>* w,
                                                   const int32_t* starts,
                                                   accumulation_t<T>* partial, int64_t rows,
                                                   int64_t columns, int64_t sequence, int taps) {
  using A = accumulation_t<T>;
  ConvColumn<T, kTaps> conv(x, w, starts, rows, columns, sequence, taps);
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  A sums[kTaps] = {};
  conv.begin_at(first);
#pragma unroll 4
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const int depth = conv.depth(row);
    const A dp = conv.differentiate(widen(dy[row * columns + conv.column]), depth);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      if (conv.reads(j, depth)) sums[j] += dp * conv.window[j];
    }
    conv.go_down(row + 1);
  }
  A* to = partial + (int64_t{blockIdx.y} * columns + conv.column) * taps;
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

template <class T>
struct CausalConvCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(0).shape;
    const bool few = args.input(1).shape[1] <= kFewTaps;
    launch(args, conv_launch(x),
           few ? causal_conv_kernel<T, kFewTaps> : causal_conv_kernel<T, kMostTaps>, args.in<T>(0),
           args.in<A>(1), args.in<int32_t>(2), args.out<T>(0), x[0], x[1],
           args.attributes->as<CausalConvAttributes>().sequence, args.input(1).shape[1]);
  }
};

template <class T>
struct CausalConvGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(1).shape;
    const bool few = args.input(2).shape[1] <= kFewTaps;
    launch(
        args, conv_launch(x),
        few ? causal_conv_gradient_kernel<T, kFewTaps> : causal_conv_gradient_kernel<T, kMostTaps>,
        args.in<T>(0), args.in<T>(1), args.in<A>(2), args.in<int32_t>(3), args.out<T>(0), x[0],
        x[1], args.attributes->as<CausalConvAttributes>().sequence, args.input(2).shape[1]);
  }
};

template <class T>
struct CausalConvWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(1).shape;
    const auto& attributes = args.attributes->as<CausalConvAttributes>();
    auto* partial = reinterpret_cast<A*>(args.scratch);
    const bool few = args.input(2).shape[1] <= kFewTaps;
    launch(args, conv_launch(x),
           few ? causal_conv_weight_gradient_kernel<T, kFewTaps>
               : causal_conv_weight_gradient_kernel<T, kMostTaps>,
           args.in<T>(0), args.in<T>(1), args.in<A>(2), args.in<int32_t>(3), partial, x[0], x[1],
           attributes.sequence, args.input(2).shape[1]);
    add_pieces(args, partial, conv_pieces(x[0]), args.input(2).shape.elements(), args.out<A>(0),
               attributes.accumulate);
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
