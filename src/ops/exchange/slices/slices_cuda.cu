#include "ops/exchange/slices/slices_cpu.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kSliceThreads = 256;

// All of `to` [outer, extent, inner] comes from `from` [outer, from_extent, inner], or
// from one such tensor for each rank.
template <class Element, bool kJoin>
__global__ void copy_slices_kernel(Element* to, const Element* from, SliceCut cut, int64_t outer,
                                   int64_t extent, int64_t from_extent, int64_t inner) {
  const int64_t rows = outer * extent;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * inner; i += step) {
    const int64_t row = i / inner;
    SliceIndex found =
        kJoin ? index_in_slice(cut, row % extent) : index_in_whole(cut, row % extent);
    if (!kJoin) found.rank = 0;
    const int64_t source = (found.rank * outer + row / extent) * from_extent + found.index;
    to[i] = from[source * inner + i % inner];
  }
}

// Moved in elements as wide as all rows allow.
template <bool kJoin>
void copy_slices(const CudaKernelArguments& args) {
  const auto cut = args.attributes->as<SliceCut>();
  const CutShape to(args.output(0).shape, cut.dimension);
  const int64_t from_extent = kJoin ? slice_extent(cut) : whole_extent(cut);
  const auto element = static_cast<int64_t>(size_of(args.output(0).dtype));
  const int64_t bytes = to.inner * element;
  const auto copy = [&]<class Element>(Element) {
    const int64_t inner = bytes / static_cast<int64_t>(sizeof(Element));
    launch(args, {blocks_for(args, to.outer * to.extent * inner, kSliceThreads), kSliceThreads},
           copy_slices_kernel<Element, kJoin>, static_cast<Element*>(args.output(0).data),
           static_cast<const Element*>(args.input(0).data), cut, to.outer, to.extent, from_extent,
           inner);
  };
  if (bytes % 16 == 0) {
    copy(uint4());
  } else if (element == 8) {
    copy(uint64_t());
  } else if (element == 4) {
    copy(uint32_t());
  } else {
    copy(uint16_t());
  }
}

template <class T>
__global__ void take_slice_gradient_kernel(const T* d_slice, accumulation_t<T>* d_whole,
                                           SliceCut cut, int64_t elements, int64_t extent,
                                           int64_t inner) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const int64_t row = i / inner;
    const OwnIndex own = own_index(cut, row % extent);
    const int64_t from = row / extent * slice_extent(cut) + own.index;
    d_whole[i] = (cut.accumulate ? d_whole[i] : 0) +
                 (own.is_there ? widen(d_slice[from * inner + i % inner]) : 0);
  }
}

template <class T>
struct TakeSliceGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const auto cut = args.attributes->as<SliceCut>();
    const Shape& shape = args.output(0).shape;
    const CutShape to(shape, cut.dimension);
    launch(args, {blocks_for(args, shape.elements(), kSliceThreads), kSliceThreads},
           take_slice_gradient_kernel<T>, args.in<T>(0), args.out<accumulation_t<T>>(0), cut,
           shape.elements(), to.extent, to.inner);
  }
};

}  // namespace

CudaKernel take_slice_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<TakeSliceGradientCuda>(op.input(0).dtype);
}

CudaKernel join_slices_cuda_kernel(const OpView&) {
  return &copy_slices<true>;
}

CudaKernel take_slice_cuda_kernel(const OpView&) {
  return &copy_slices<false>;
}

}  // namespace troupe
