#include "ops/exchange/slices/slices_cpu.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/vector.h"
#include "program/kernel.h"

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

template <class T>
struct TakeSliceGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto cut = args.attributes->as<SliceCut>();
    const CutShape to(args.output(0).shape, cut.dimension);
    const T* d_slice = args.in<T>(0);
    A* d_whole = args.out<A>(0);
    args.pool->parallel_ranges(
        to.outer * to.extent, row_grain(to.inner), [=](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            const OwnIndex own = own_index(cut, row % to.extent);
            const T* from = d_slice + (row / to.extent * slice_extent(cut) + own.index) * to.inner;
            A* target = d_whole + row * to.inner;
            for (int64_t i = 0; i < to.inner; ++i) {
              target[i] =
                  (cut.accumulate ? target[i] : A(0)) + (own.is_there ? widen(from[i]) : A(0));
            }
          }
        });
  }
};

}  // namespace

CpuKernel take_slice_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<TakeSliceGradientKernel>(op.input(0).dtype);
}

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
