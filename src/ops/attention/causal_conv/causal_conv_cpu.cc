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
        before(args.in<T>(first + 3)),
        rows(args.input(first).shape[0]),
        columns(args.input(first).shape[1]),
        taps(args.input(first + 1).shape[1]),
        sequence(args.attributes->as<CausalConvAttributes>().sequence) {}

  // Calls visit(tap, what it multiplies) for the taps of a row that count.
  template <class Visit>
  void for_taps(int64_t row, int64_t column, const Visit& visit) const {
    const int64_t position = row % sequence;
    const int64_t seen = depth(row);
    for (int64_t j = 0; j < taps; ++j) {
      const int64_t back = taps - 1 - j;
      if (back > seen) continue;
      const T* in = back <= position
                        ? x + (row - back) * columns
                        : before + earlier_row(row / sequence, back - position) * columns;
      visit(j, in + column);
    }
  }

  // Rows before a row that count for it.
  int64_t depth(int64_t row) const {
    return rows_seen(row, row % sequence, before == nullptr ? 0 : taps - 1, starts);
  }
  // The row of `before` that is so far before a sequence.
  int64_t earlier_row(int64_t of_sequence, int64_t distance) const {
    return (of_sequence + 1) * (taps - 1) - distance;
  }

  // p of a row.
  void convolve(int64_t row, int64_t column, int64_t width, A* p) const {
    std::fill_n(p, width, A(0));
    for_taps(row, column, [=, this](int64_t j, const T* in) {
      for (int64_t i = 0; i < width; ++i) p[i] += w[(column + i) * taps + j] * widen(in[i]);
    });
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
  const T* before;
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
    T* d_before = conv.before == nullptr ? nullptr : args.out<T>(1);
    conv.for_columns(*args.pool, [&](int64_t column, int64_t width) {
      // dp of the rows that read the current one: row r is kept at r mod K.
      std::array<std::array<A, kColumns>, kMostTaps> later = {};
      // Of the row so far before or, if negative, after the first of its sequence.
      const auto sum_readers = [&](int64_t first, int64_t distance, T* out) {
        std::array<A, kColumns> sum = {};
        for (int64_t j = 0; j < conv.taps; ++j) {
          const int64_t back = conv.taps - 1 - j;
          const int64_t position = back - distance;
          if (position < 0 || position >= conv.sequence) continue;
          if (back > conv.depth(first + position)) continue;
          const A* dp = later[static_cast<size_t>((first + position) % conv.taps)].data();
          for (int64_t i = 0; i < width; ++i) {
            sum[static_cast<size_t>(i)] += conv.w[(column + i) * conv.taps + j] * dp[i];
          }
        }
        store(sum.data(), out + column, width);
      };
      for (int64_t row = conv.rows - 1; row >= 0; --row) {
        conv.differentiate(row, column, width, dy,
                           later[static_cast<size_t>(row % conv.taps)].data());
        const int64_t first = row - row % conv.sequence;
        sum_readers(first, first - row, dx + row * conv.columns);
        if (row > first || d_before == nullptr) continue;
        for (int64_t distance = 1; distance < conv.taps; ++distance) {
          const int64_t to = conv.earlier_row(row / conv.sequence, distance);
          sum_readers(first, distance, d_before + to * conv.columns);
        }
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
        conv.for_taps(row, column, [&](int64_t j, const T* in) {
          for (int64_t i = 0; i < width; ++i) {
            sums[static_cast<size_t>(i * conv.taps + j)] +=
                dp[static_cast<size_t>(i)] * widen(in[i]);
          }
        });
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
