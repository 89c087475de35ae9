#include "ops/slices/slices_cpu.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/vector.h"

namespace troupe {
namespace {

// Copies `to` from `from`, stretch by stretch of the cut dimension of `to`. find(i) says where its
// index i lies in a slice or in the whole tensor, and shape is that of each of these in `from`.
template <class Find>
void copy_stretches(const KernelArguments& args, int dimension, const CutShape& shape,
                    const Find& find) {
  const TensorView& target = args.output(0);
  const CutShape to(target.shape, dimension);
  const size_t bytes = static_cast<size_t>(to.inner) * size_of(target.dtype);
  const auto* from = static_cast<const std::byte*>(args.input(0).data);
  args.pool->parallel_ranges(
      to.outer * to.extent, row_grain(to.inner), [=](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end;) {
          const int64_t outer = row / to.extent;
          const SliceIndex found = find(row % to.extent);
          const int64_t count = std::min(found.count, end - row);
          const int64_t source = (found.rank * to.outer + outer) * shape.extent + found.index;
          std::memcpy(static_cast<std::byte*>(target.data) + static_cast<size_t>(row) * bytes,
                      from + static_cast<size_t>(source) * bytes,
                      static_cast<size_t>(count) * bytes);
          row += count;
        }
      });
}

}  // namespace

void join_slices_cpu(const KernelArguments& args) {
  const auto cut = args.attributes->as<SliceCut>();
  CutShape slice(args.output(0).shape, cut.dimension);
  slice.extent = slice_extent(cut);
  copy_stretches(args, cut.dimension, slice, [cut](int64_t i) { return index_in_slice(cut, i); });
}

void take_slice_cpu(const KernelArguments& args) {
  const auto cut = args.attributes->as<SliceCut>();
  copy_stretches(args, cut.dimension, CutShape(args.input(0).shape, cut.dimension),
                 [cut](int64_t i) {
                   SliceIndex found = index_in_whole(cut, i);
                   found.rank = 0;  // there is one tensor
                   return found;
                 });
}

}  // namespace troupe
