#include "ops/cpu/vector.h"
#include "ops/elementwise/column_groups/column_groups.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T, bool kSplit>
void move_column_groups(const KernelArguments& args, T* x, T* first, T* second, int64_t rows) {
  const auto attributes = args.attributes->as<ColumnGroupsAttributes>();
  const int64_t columns = attributes.columns();
  const int64_t in_first = attributes.first_columns();
  args.pool->parallel_ranges(rows, row_grain(columns), [=](int64_t begin, int64_t end, int) {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t to = attributes.destination(column);
      const bool is_first = to < in_first;
      T* other = is_first ? first + to : second + (to - in_first);
      const int64_t stride = is_first ? in_first : columns - in_first;
      for (int64_t row = begin; row < end; ++row) {
        T& apart = other[row * stride];
        T& together = x[row * columns + column];
        (kSplit ? apart : together) = kSplit ? together : apart;
      }
    }
  });
}

template <class T>
struct SplitColumnGroupsKernel {
  static void run(const KernelArguments& args) {
    move_column_groups<T, true>(args, args.input(0).as<T>(), args.out<T>(0), args.out<T>(1),
                                args.input(0).shape[0]);
  }
};

template <class T>
struct JoinColumnGroupsKernel {
  static void run(const KernelArguments& args) {
    move_column_groups<T, false>(args, args.out<T>(0), args.input(0).as<T>(), args.input(1).as<T>(),
                                 args.output(0).shape[0]);
  }
};

}  // namespace

CpuKernel split_column_groups_cpu_kernel(const OpView& op) {
  return select_float_kernel<SplitColumnGroupsKernel>(op.input(0).dtype);
}

CpuKernel join_column_groups_cpu_kernel(const OpView& op) {
  return select_float_kernel<JoinColumnGroupsKernel>(op.input(0).dtype);
}

}  // namespace troupe
