#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/products/embedding/embedding.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kEmbeddingGrain = 32768;   // elements
constexpr int64_t kEmbeddingColumns = 1024;  // of a row of the gradient that are summed at a time

int64_t embedding_row_grain(int64_t hidden) {
  return std::max<int64_t>(1, kEmbeddingGrain / std::max<int64_t>(1, hidden));
}

template <class T>
struct EmbeddingKernel {
  static void run(const KernelArguments& args) {
    const int32_t* tokens = args.in<int32_t>(0);
    const T* weight = args.in<T>(1);
    T* y = args.out<T>(0);
    const int64_t vocabulary = args.input(1).shape[0];
    const int64_t hidden = args.input(1).shape[1];
    const auto copy_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        if (tokens[t] >= 0 && tokens[t] < vocabulary) {
          std::copy_n(weight + tokens[t] * hidden, hidden, y + t * hidden);
        } else {
          std::fill_n(y + t * hidden, hidden, T(0.0F));
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape[0], embedding_row_grain(hidden), copy_rows);
  }
};

// Out is the type of the gradient.
template <class T, class Out>
void run_embedding_weight_gradient(const KernelArguments& args) {
  using A = accumulation_t<T>;
  const auto& attributes = args.attributes->as<EmbeddingWeightGradientAttributes>();
  const bool accumulate = attributes.accumulate;
  const int64_t vocabulary = attributes.vocabulary;
  const int32_t padding = attributes.padding_token;
  const T* dy = args.in<T>(0);
  const int32_t* tokens = args.in<int32_t>(1);
  Out* d_weight = args.out<Out>(0);
  const int64_t count = args.input(1).shape[0];
  const int64_t hidden = args.input(0).shape[1];

  const auto counts = [=](int64_t t) {
    return tokens[t] >= 0 && tokens[t] < vocabulary && tokens[t] != padding;
  };

  // Counting sort. `end` first counts, then holds where each row's positions begin, and after
  // placing where they end, which is where the next row's begin.
  auto* end = reinterpret_cast<int32_t*>(args.workspace);
  int32_t* positions = end + vocabulary;
  std::fill_n(end, vocabulary, 0);
  for (int64_t t = 0; t < count; ++t) {
    if (counts(t)) ++end[tokens[t]];
  }
  int32_t begin = 0;
  for (int64_t v = 0; v < vocabulary; ++v) {
    const int32_t next = begin + end[v];
    end[v] = begin;
    begin = next;
  }
  for (int64_t t = 0; t < count; ++t) {
    if (counts(t)) positions[end[tokens[t]]++] = static_cast<int32_t>(t);
  }

  const auto sum_rows = [=](int64_t first, int64_t last, int) {
    A sums[kEmbeddingColumns];
    for (int64_t v = first; v < last; ++v) {
      const int32_t own = v == 0 ? 0 : end[v - 1];
      if (own == end[v]) {
        if (!accumulate) std::fill_n(d_weight + v * hidden, hidden, Out(A(0)));
        continue;
      }
      for (int64_t column = 0; column < hidden; column += kEmbeddingColumns) {
        const int64_t columns = std::min(kEmbeddingColumns, hidden - column);
        const auto row_of = [=](int32_t next) { return dy + positions[next] * hidden + column; };
        Out* out = d_weight + v * hidden + column;
        int32_t next = own;
        if (accumulate) {
          load(out, sums, columns);
        } else {
          load(row_of(next++), sums, columns);
        }
        for (; next < end[v]; ++next) add_to(row_of(next), sums, columns);
        store(sums, out, columns);
      }
    }
  };
  args.pool->parallel_ranges(vocabulary, embedding_row_grain(hidden), sum_rows);
}

template <class T>
struct EmbeddingWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_embedding_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CpuKernel embedding_cpu_kernel(const OpView& op) {
  return select_float_kernel<EmbeddingKernel>(op.output(0).dtype);
}

CpuKernel embedding_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_embedding_weight_gradient<bf16, bf16>;
  return select_float_kernel<EmbeddingWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
