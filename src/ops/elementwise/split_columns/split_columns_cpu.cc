#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/elementwise/split_columns/split_columns.h"

namespace troupe {
namespace {

// The bytes of a row of a matrix, and where they begin.
struct Rows {
  explicit Rows(const TensorView& view)
      : data(static_cast<std::byte*>(view.data)),
        bytes(static_cast<size_t>(view.shape[1]) * size_of(view.dtype)) {}
  std::byte* at(int64_t row) const { return data + static_cast<size_t>(row) * bytes; }

  std::byte* data;
  size_t bytes;
};

}  // namespace

void split_columns_cpu(const KernelArguments& args) {
  const Rows x(args.input(0));
  const Rows first(args.output(0));
  const Rows rest(args.output(1));
  args.pool->parallel_ranges(args.input(0).shape[0], row_grain(args.input(0).shape[1]),
                             [=](int64_t begin, int64_t end, int) {
                               for (int64_t row = begin; row < end; ++row) {
                                 std::memcpy(first.at(row), x.at(row), first.bytes);
                                 std::memcpy(rest.at(row), x.at(row) + first.bytes, rest.bytes);
                               }
                             });
}

void join_columns_cpu(const KernelArguments& args) {
  const Rows first(args.input(0));
  const Rows rest(args.input(1));
  const Rows x(args.output(0));
  args.pool->parallel_ranges(args.output(0).shape[0], row_grain(args.output(0).shape[1]),
                             [=](int64_t begin, int64_t end, int) {
                               for (int64_t row = begin; row < end; ++row) {
                                 std::memcpy(x.at(row), first.at(row), first.bytes);
                                 std::memcpy(x.at(row) + first.bytes, rest.at(row), rest.bytes);
                               }
                             });
}

}  // namespace troupe
