#include "ops/causal_conv/causal_conv.h"
#include "ops/causal_conv/causal_conv_pieces.h"
#include "ops/cuda/device.cuh"
#include "ops/cuda/row_sums.cuh"

namespace troupe {
namespace {

constexpr int kConvThreads = 128;

// One column of the operands, and the taps of that, which a thread walks down.
template <class T>
struct ConvColumn {
  using A = accumulation_t<T>;
  const T* x;
  const int32_t* starts;
  int64_t columns;
  int64_t sequence;
  int64_t column;
  int taps;
  A w[kMostTaps];

  __device__ ConvColumn(const T* x, const A* weight, const int32_t* starts, int64_t columns,
                        int64_t sequence, int taps)
      : x(x),
        starts(starts),
        columns(columns),
        sequence(sequence),
        column(int64_t{blockIdx.x} * blockDim.x + threadIdx.x),
        taps(taps) {
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j) {
      w[j] = j < taps && column < columns ? weight[column * taps + j] : A(0);
    }
  }

  // p of a row.
  __device__ A convolve(int64_t row) const {
    const int64_t seen = first_row_seen(row, sequence, starts);
    A p = 0;
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j) {
      const int64_t from = row - taps + 1 + j;
      if (j < taps && from >= seen) p += w[j] * widen(x[from * columns + column]);
    }
    return p;
  }

  // dp of a row.
  __device__ A differentiate(int64_t row, const T* dy) const {
    const A p = convolve(row);
    const A s = sigmoid(p);
    return widen(dy[row * columns + column]) * s * (A(1) + p * (A(1) - s));
  }
};

// A thread for each column and kConvPieceRows rows.
template <class T>
__global__ void causal_conv_kernel(const T* x, const accumulation_t<T>* w, const int32_t* starts,
                                   T* y, int64_t rows, int64_t columns, int64_t sequence,
                                   int taps) {
  using A = accumulation_t<T>;
  const ConvColumn<T> conv(x, w, starts, columns, sequence, taps);
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const A p = conv.convolve(row);
    y[row * columns + conv.column] = round_to<T>(p * sigmoid(p));
  }
}

// Goes up, with dp of the rows that read the current one, the nearest first.
template <class T>
__global__ void causal_conv_gradient_kernel(const T* dy, const T* x, const accumulation_t<T>* w,
                                            const int32_t* starts, T* dx, int64_t rows,
                                            int64_t columns, int64_t sequence, int taps) {
  using A = accumulation_t<T>;
  const ConvColumn<T> conv(x, w, starts, columns, sequence, taps);
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  const int64_t last = (first + kConvPieceRows < rows ? first + kConvPieceRows : rows) - 1;
  A later[kMostTaps] = {};
  for (int64_t row = last + taps - 1; row >= first; --row) {
#pragma unroll
    for (int j = kMostTaps - 1; j > 0; --j) later[j] = later[j - 1];
    later[0] = row < rows ? conv.differentiate(row, dy) : A(0);
    if (row > last) continue;
    A sum = 0;
#pragma unroll
    for (int ahead = 0; ahead < kMostTaps; ++ahead) {
      const int64_t reader = row + ahead;
      if (ahead < taps && reader < rows && first_row_seen(reader, sequence, starts) <= row) {
        A tap = 0;
#pragma unroll
        for (int j = 0; j < kMostTaps; ++j) tap = j == taps - 1 - ahead ? conv.w[j] : tap;
        sum += tap * later[ahead];
      }
    }
    dx[row * columns + conv.column] = round_to<T>(sum);
  }
}

// `partial` has [pieces, columns, taps].
template <class T>
__global__ void causal_conv_weight_gradient_kernel(const T* dy, const T* x,
                                                   const accumulation_t<T>* w,
                                                   const int32_t* starts,
                                                   accumulation_t<T>* partial, int64_t rows,
                                                   int64_t columns, int64_t sequence, int taps) {
  using A = accumulation_t<T>;
  const ConvColumn<T> conv(x, w, starts, columns, sequence, taps);
  if (conv.column >= columns) return;
  const int64_t first = int64_t{blockIdx.y} * kConvPieceRows;
  A sums[kMostTaps] = {};
  for (int64_t row = first; row < first + kConvPieceRows && row < rows; ++row) {
    const A dp = conv.differentiate(row, dy);
    const int64_t seen = first_row_seen(row, sequence, starts);
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j) {
      const int64_t from = row - taps + 1 + j;
      if (j < taps && from >= seen) sums[j] += dp * widen(x[from * columns + conv.column]);
    }
  }
  A* to = partial + (int64_t{blockIdx.y} * columns + conv.column) * taps;
#pragma unroll
  for (int j = 0; j < kMostTaps; ++j) {
    if (j < taps) to[j] = sums[j];
  }
}

Launch conv_launch(const Shape& x) {
  return {dim3(static_cast<unsigned>(ceil_divide(x[1], kConvThreads)),
               static_cast<unsigned>(conv_pieces(x[0]))),
          kConvThreads};
}

template <class T>
struct CausalConvCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(0).shape;
    launch(args, conv_launch(x), causal_conv_kernel<T>, args.in<T>(0), args.in<A>(1),
           args.in<int32_t>(2), args.out<T>(0), x[0], x[1],
           args.attributes->as<CausalConvAttributes>().sequence, args.input(1).shape[1]);
  }
};

template <class T>
struct CausalConvGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(1).shape;
    launch(args, conv_launch(x), causal_conv_gradient_kernel<T>, args.in<T>(0), args.in<T>(1),
           args.in<A>(2), args.in<int32_t>(3), args.out<T>(0), x[0], x[1],
           args.attributes->as<CausalConvAttributes>().sequence, args.input(2).shape[1]);
  }
};

template <class T>
struct CausalConvWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const Shape& x = args.input(1).shape;
    const auto& attributes = args.attributes->as<CausalConvAttributes>();
    auto* partial = reinterpret_cast<A*>(args.scratch);
    launch(args, conv_launch(x), causal_conv_weight_gradient_kernel<T>, args.in<T>(0),
           args.in<T>(1), args.in<A>(2), args.in<int32_t>(3), partial, x[0], x[1],
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
