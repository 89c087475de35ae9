#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "program/kernel.h"

namespace troupe {
namespace {

// The weight gradient is computed in tiles of columns of one expert; rows are summed in groups and
// then the groups, in order, so that the error grows with the length of the longer of the two.
constexpr int64_t kGroupedBiasColumns = 256;
constexpr int64_t kGroupedBiasRows = 128;

// The expert of a live row.
int64_t expert_of_row(const int32_t* offsets, int64_t experts, int64_t row) {
  return std::upper_bound(offsets, offsets + experts + 1, row) - offsets - 1;
}

// The router's probability of each row.
template <class A>
struct RowProbabilities {
  const A* probabilities;  // nullptr: all are 1
  const int32_t* row_slot;
  int64_t slots;

  bool is_filler(int64_t row) const {
    return probabilities != nullptr && (row_slot[row] < 0 || row_slot[row] >= slots);
  }
  A operator[](int64_t row) const {
    if (probabilities == nullptr) return A(1);
    return is_filler(row) ? A(0) : probabilities[row_slot[row]];
  }
};

// From input `i` and the one after it.
template <class A>
RowProbabilities<A> row_probabilities(const KernelArguments& args, int i) {
  const A* probabilities = args.in<A>(i);
  return {probabilities, args.in<int32_t>(i + 1),
          probabilities != nullptr ? args.input(i).shape.elements() : 0};
}

// Calls each(biases, experts, offsets) for the biases of the first experts, and for those of the
// last ones where they are in a second tensor.
template <class T, class Each>
void for_each_bias(const KernelArguments& args, const Each& each) {
  const int64_t experts = args.input(1).shape[0];
  const auto* offsets = args.in<int32_t>(2);
  each(args.in<T>(1), experts, offsets);
  if (args.inputs.size() > 5) each(args.in<T>(5), args.input(5).shape[0], offsets + experts);
}

template <class T>
struct GroupedBiasKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* x = args.in<T>(0);
    const auto probabilities = row_probabilities<A>(args, 3);
    T* y = args.out<T>(0);
    const int64_t columns = args.input(0).shape[1];
    for_each_bias<T>(args, [&](const T* bias, int64_t experts, const int32_t* offsets) {
      const auto add_rows = [=](int64_t begin, int64_t end, int) {
        int64_t e = expert_of_row(offsets, experts, offsets[0] + begin);
        for (int64_t row = offsets[0] + begin; row < offsets[0] + end; ++row) {
          while (offsets[e + 1] <= row) ++e;
          const A p = probabilities[row];
          const T* in = x + row * columns;
          const T* b = bias + e * columns;
          T* out = y + row * columns;
          TROUPE_INDEPENDENT
          for (int64_t n = 0; n < columns; ++n) out[n] = T(widen(in[n]) + p * widen(b[n]));
        }
      };
      args.pool->parallel_ranges(offsets[experts] - offsets[0], row_grain(columns), add_rows);
    });
  }
};

// Out is the type of the gradient.
template <class T, class Out>
void run_grouped_bias_weight_gradient(const KernelArguments& args) {
  using A = accumulation_t<T>;
  const auto& attributes = args.attributes->as<GroupedBiasWeightGradientAttributes>();
  const bool accumulate = attributes.accumulate;
  const T* dy = args.in<T>(0);
  const int32_t* offsets = args.in<int32_t>(1) + attributes.first;
  const auto probabilities = row_probabilities<A>(args, 2);
  Out* d_bias = args.out<Out>(0);
  const int64_t columns = args.input(0).shape[1];
  const int64_t experts = args.output(0).shape[0];
  const int64_t tiles = (columns + kGroupedBiasColumns - 1) / kGroupedBiasColumns;
  args.pool->parallel_for(experts * tiles, [=](int64_t piece, int) {
    const int64_t e = piece / tiles;
    if (accumulate && offsets[e] == offsets[e + 1]) return;
    const int64_t first = piece % tiles * kGroupedBiasColumns;
    const int64_t count = std::min(kGroupedBiasColumns, columns - first);
    A sums[kGroupedBiasColumns] = {};
    for (int64_t start = offsets[e]; start < offsets[e + 1]; start += kGroupedBiasRows) {
      const int64_t end = std::min<int64_t>(start + kGroupedBiasRows, offsets[e + 1]);
      A group[kGroupedBiasColumns] = {};
      for (int64_t row = start; row < end; ++row) {
        if (probabilities.is_filler(row)) continue;
        axpy(probabilities[row], dy + row * columns + first, group, count);
      }
      add_to(group, sums, count);
    }
    Out* out = d_bias + e * columns + first;
    if (accumulate) add_to(out, sums, count);
    store(sums, out, count);
  });
}

template <class T>
struct GroupedBiasWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_grouped_bias_weight_gradient<T, accumulation_t<T>>(args);
  }
};

template <class T>
struct GroupedBiasProbabilityGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const T* dy = args.in<T>(0);
    const auto probabilities = row_probabilities<A>(args, 3);
    A* d_probabilities = args.out<A>(0);
    const int64_t columns = args.input(0).shape[1];
    std::fill_n(d_probabilities, probabilities.slots, A(0));
    for_each_bias<T>(args, [&](const T* bias, int64_t experts, const int32_t* offsets) {
      const auto differentiate_rows = [=](int64_t begin, int64_t end, int) {
        int64_t e = expert_of_row(offsets, experts, offsets[0] + begin);
        for (int64_t row = offsets[0] + begin; row < offsets[0] + end; ++row) {
          while (offsets[e + 1] <= row) ++e;
          if (probabilities.is_filler(row)) continue;
          d_probabilities[probabilities.row_slot[row]] =
              dot(bias + e * columns, dy + row * columns, columns);
        }
      };
      args.pool->parallel_ranges(offsets[experts] - offsets[0], row_grain(columns),
                                 differentiate_rows);
    });
  }
};

}  // namespace

CpuKernel grouped_bias_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedBiasKernel>(op.input(0).dtype);
}

CpuKernel grouped_bias_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_grouped_bias_weight_gradient<bf16, bf16>;
  return select_float_kernel<GroupedBiasWeightGradientKernel>(op.input(0).dtype);
}

CpuKernel grouped_bias_probability_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedBiasProbabilityGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
