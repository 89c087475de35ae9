#include "ops/losses/cross_entropy/cross_entropy_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/exponentials.h"
#include "ops/cpu/vector.h"

namespace troupe {
namespace {

// Elements of the logits that a piece of work reads, about.
constexpr int64_t kCrossEntropyPiece = 32768;

int64_t cross_entropy_rows_per_piece(int64_t vocabulary) {
  return std::max<int64_t>(1, kCrossEntropyPiece / vocabulary);
}

// What every token's loss is divided by.
template <class A>
double token_divisor(const A* mask, int64_t tokens) {
  const double total =
      lane_sum<double>(tokens, [=](int64_t t) { return static_cast<double>(mask[t]); });
  return std::max(total, 1.0);
}

// As above, or as input `i` says, where it is present.
template <class A>
double token_divisor(const KernelArguments& args, int i, const A* mask, int64_t tokens) {
  const A* given = args.in<A>(i);
  if (given == nullptr) return token_divisor(mask, tokens);
  return std::max(static_cast<double>(*given), 1.0);
}

// T: dtype of the logits.
template <class T>
struct CrossEntropyKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t tokens = args.input(0).shape[0];
    const int64_t vocabulary = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const int32_t* labels = args.in<int32_t>(1);
    const A* mask = args.in<A>(2);
    A* lse = args.out<A>(1);
    double* losses = reinterpret_cast<double*>(args.workspace);
    args.pool->parallel_ranges(
        tokens, cross_entropy_rows_per_piece(vocabulary), [&](int64_t begin, int64_t end, int) {
          for (int64_t t = begin; t < end; ++t) {
            const T* row = logits + t * vocabulary;
            const auto [largest, total] = exponential_sum(row, vocabulary);
            lse[t] = largest + std::log(total);
            losses[t] = 0;
            if (mask[t] != A(0) && labels[t] >= 0 && labels[t] < vocabulary) {
              losses[t] = static_cast<double>(mask[t]) *
                          (static_cast<double>(lse[t]) - static_cast<double>(row[labels[t]]));
            }
          }
        });
    args.out<A>(0)[0] = static_cast<A>(sum(losses, tokens) / token_divisor(args, 3, mask, tokens));
  }
};

template <class T>
struct CrossEntropyPartKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t vocabulary = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const int32_t* labels = args.in<int32_t>(1);
    A* part = args.out<A>(0);
    args.pool->parallel_ranges(args.input(0).shape[0], cross_entropy_rows_per_piece(vocabulary),
                               [&](int64_t begin, int64_t end, int) {
                                 for (int64_t t = begin; t < end; ++t) {
                                   const T* row = logits + t * vocabulary;
                                   const auto [largest, total] = exponential_sum(row, vocabulary);
                                   part[3 * t] = largest;
                                   part[3 * t + 1] = total;
                                   const bool here = labels[t] >= 0 && labels[t] < vocabulary;
                                   part[3 * t + 2] = here ? widen(row[labels[t]]) : A(0);
                                 }
                               });
  }
};

template <class T>
struct CrossEntropyOfPartsKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t tokens = args.input(0).shape[0];
    const int64_t parts = args.input(3).shape[0] / tokens;
    const A* mask = args.in<A>(2);
    const A* all = args.in<A>(3);
    A* lse = args.out<A>(1);
    double* losses = reinterpret_cast<double*>(args.workspace);
    for (int64_t t = 0; t < tokens; ++t) {
      A largest = all[3 * t];
      for (int64_t p = 1; p < parts; ++p) largest = std::max(largest, all[3 * (p * tokens + t)]);
      A total = 0;
      A label = 0;
      for (int64_t p = 0; p < parts; ++p) {
        const A* part = all + 3 * (p * tokens + t);
        total += part[1] * std::exp(part[0] - largest);
        label += part[2];
      }
      lse[t] = largest + std::log(total);
      losses[t] = mask[t] == A(0) ? 0
                                  : static_cast<double>(mask[t]) *
                                        (static_cast<double>(lse[t]) - static_cast<double>(label));
    }
    args.out<A>(0)[0] = static_cast<A>(sum(losses, tokens) / token_divisor(args, 4, mask, tokens));
  }
};

template <class T>
struct CrossEntropyGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const int64_t tokens = args.input(0).shape[0];
    const int64_t vocabulary = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const int32_t* labels = args.in<int32_t>(1);
    const A* mask = args.in<A>(2);
    const A* lse = args.in<A>(3);
    const double scale =
        static_cast<double>(args.in<A>(4)[0]) / token_divisor(args, 5, mask, tokens);
    T* d_logits = args.out<T>(0);
    args.pool->parallel_ranges(
        tokens, cross_entropy_rows_per_piece(vocabulary), [&](int64_t begin, int64_t end, int) {
          for (int64_t t = begin; t < end; ++t) {
            const T* row = logits + t * vocabulary;
            T* out = d_logits + t * vocabulary;
            if (mask[t] == A(0)) {
              std::fill(out, out + vocabulary, T(A(0)));
              continue;
            }
            const A factor = static_cast<A>(scale * static_cast<double>(mask[t]));
            const A shift = lse[t];
            const int32_t label = labels[t];
            // The label's probability is needed unrounded, and `out` may be `row`.
            const bool valid = label >= 0 && label < vocabulary;
            const A hit = valid ? exp_fast(widen(row[label]) - shift) - A(1) : A(0);
            scaled_exponentials(row, vocabulary, shift, factor, out);
            if (valid) out[label] = T(factor * hit);
          }
        });
  }
};

}  // namespace

CpuKernel cross_entropy_cpu_kernel(const OpView& op) {
  return select_float_kernel<CrossEntropyKernel>(op.input(0).dtype);
}

CpuKernel cross_entropy_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<CrossEntropyGradientKernel>(op.input(0).dtype);
}

CpuKernel cross_entropy_part_cpu_kernel(const OpView& op) {
  return select_float_kernel<CrossEntropyPartKernel>(op.input(0).dtype);
}

CpuKernel cross_entropy_of_parts_cpu_kernel(const OpView& op) {
  return select_float_kernel<CrossEntropyOfPartsKernel>(op.input(0).dtype);
}

}  // namespace troupe
