#include <algorithm>
#include <array>

#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kColumns = 64;  // of a piece of work

// What the three kernels read, of `width` columns from `column` on.
template <class T>
struct ConvRows {
  using A = accumulation_t<T>;

  ConvRows(const KernelArguments& args, int first)
      : x(args.in<T>(first)),
        w(args.in<A>(first + 1)),
        starts(args.in<int32_t>(first + 2)),
        rows(args.input(first).shape[0]),
        columns(args.input(first).shape[1]),
        taps(args.input(first + 1).shape[1]),
        sequence(args.attributes->as<CausalConvAttributes>().sequence) {}

  // p of a row.
  void convolve(int64_t row, int64_t column, int64_t width, A* p) const {
    std::fill_n(p, width, A(0));
    const int64_t seen = first_row_seen(row, sequence, starts);
    for (int64_t j = 0; j < taps; ++j) {
      const int64_t from = row - taps + 1 + j;
      if (from < seen) continue;
      const T* in = x + from * columns + column;
      for (int64_t i = 0; i < width; ++i) p[i] += w[(column + i) * taps + j] * widen(in[i]);
    }
  }

  // dp of a row.
  void differentiate(int64_t row, int64_t column, int64_t width, const T* dy, A* dp) const {
    convolve(row, column, width, dp);
    const T* out = dy + row * columns + column;
    for (int64_t i = 0; i < width; ++i) {
      const A s = sigmoid(dp[i]);
      dp[i] = widen(out[i]) * s * (A(1) + dp[i] * (A(1) - s));
    }
  }

  // Calls work(first column, columns) for pieces of the columns, on all threads.
  template <class Work>
  void for_columns(ThreadPool& pool, const Work& work) const {
    pool.parallel_for((columns + kColumns - 1) / kColumns, [&](int64_t piece, int) {
      const int64_t column = piece * kColumns;
      work(column, std::min(kColumns, columns - column));
    });
  }

  const T* x;
  const A* w;
  const int32_t* starts;
  int64_t rows;
  int64_t columns;
  int64_t taps;
  int64_t sequence;
};

template <class T>
struct CausalConvKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const ConvRows<T> conv(args, 0);
    T* y = args.out<T>(0);
    conv.for_columns(*args.pool, [&](int64_t column, int64_t width) {
      std::array<A, kColumns> p;
      for (int64_t row = 0; row < conv.rows; ++row) {
        conv.convolve(row, column, width, p.data());
        T* out = y + row * conv.columns + column;
        for (int64_t i = 0; i < width; ++i) {
          out[i] = T(p[static_cast<size_t>(i)] * sigmoid(p[static_cast<size_t>(i)]));
        }
      }
    });
  }
};

template <class T>
struct CausalConvGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const ConvRows<T> conv(args, 1);
    const T* dy = args.in<T>(0);
    T* dx = args.out<T>(0);
    conv.for_columns(*args.pool, [&](int64_t column, int64_t width) {
      // dp of the rows that read the current one: row r is kept at r mod K.
      std::array<std::array<A, kColumns>, kMostTaps> later = {};
      std::array<A, kColumns> sum;
      for (int64_t row = conv.rows - 1; row >= 0; --row) {
        conv.differentiate(row, column, width, dy,
                           later[static_cast<size_t>(row % conv.taps)].data());
        sum.fill(A(0));
        for (int64_t j = 0; j < conv.taps; ++j) {
          const int64_t reader = row + conv.taps - 1 - j;
          if (reader >= conv.rows || first_row_seen(reader, conv.sequence, conv.starts) > row) {
            continue;
          }
          const A* dp = later[static_cast<size_t>(reader % conv.taps)].data();
          for (int64_t i = 0; i < width; ++i) {
            sum[static_cast<size_t>(i)] += conv.w[(column + i) * conv.taps + j] * dp[i];
          }
        }
        store(sum.data(), dx + row * conv.columns + column, width);
      }
    });
  }
};

template <class T>
struct CausalConvWeightGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const ConvRows<T> conv(args, 1);
    const T* dy = args.in<T>(0);
    A* dw = args.out<A>(0);
    const bool accumulate = args.attributes->as<CausalConvAttributes>().accumulate;
    conv.for_columns(*args.pool, [&](int64_t column, int64_t width) {
      std::array<A, kColumns> dp;
      std::array<A, kColumns* kMostTaps> sums = {};
      for (int64_t row = 0; row < conv.rows; ++row) {
        conv.differentiate(row, column, width, dy, dp.data());
        const int64_t seen = first_row_seen(row, conv.sequence, conv.starts);
        for (int64_t j = 0; j < conv.taps; ++j) {
          const int64_t from = row - conv.taps + 1 + j;
          if (from < seen) continue;
          const T* in = conv.x + from * conv.columns + column;
          for (int64_t i = 0; i < width; ++i) {
            sums[static_cast<size_t>(i * conv.taps + j)] +=
                dp[static_cast<size_t>(i)] * widen(in[i]);
          }
        }
      }
      A* to = dw + column * conv.taps;
      for (int64_t i = 0; i < width * conv.taps; ++i) {
        to[i] = (accumulate ? to[i] : A(0)) + sums[static_cast<size_t>(i)];
      }
    });
  }
};

}  // namespace

CpuKernel causal_conv_cpu_kernel(const OpView& op) {
  return select_float_kernel<CausalConvKernel>(op.input(0).dtype);
}

CpuKernel causal_conv_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<CausalConvGradientKernel>(op.input(0).dtype);
}

CpuKernel causal_conv_weight_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<CausalConvWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
