#include "ops/elementwise/column_groups/column_groups.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A block for each row; the sizes are in elements of the type Element.
template <class Element, bool kSplit>
__global__ void column_groups_kernel(Element* x, Element* first, Element* second,
                                     ColumnGroupsAttributes sizes) {
  const int64_t row = blockIdx.x;
  const int64_t columns = sizes.columns();
  const int64_t in_first = sizes.first_columns();
  x += row * columns;
  first += row * in_first;
  second += row * (columns - in_first);
  for_row(columns, [=](int64_t column) {
    const int64_t to = sizes.destination(column);
    Element* apart = to < in_first ? first + to : second + (to - in_first);
    if (kSplit) {
      *apart = x[column];
    } else {
      x[column] = *apart;
    }
  });
}

// Moved in packs of 16 bytes where all parts of a row are made of these.
template <bool kSplit>
void move_column_groups(const CudaKernelArguments& args, const CudaTensor& x,
                        const CudaTensor& first, const CudaTensor& second) {
  ColumnGroupsAttributes sizes = args.attributes->as<ColumnGroupsAttributes>();
  const auto element = static_cast<int32_t>(size_of(x.dtype));
  const int32_t pack = 16 / element;
  bool packs = sizes.tail % pack == 0;
  for (const int32_t width : sizes.widths) packs = packs && width % pack == 0;
  const auto move = [&]<class Element>(Element) {
    launch(args, {static_cast<unsigned>(x.shape[0]), threads_for_row(sizes.columns(), 4)},
           column_groups_kernel<Element, kSplit>, static_cast<Element*>(x.data),
           static_cast<Element*>(first.data), static_cast<Element*>(second.data), sizes);
  };
  if (packs) {
    sizes.tail /= pack;
    for (int32_t& width : sizes.widths) width /= pack;
    move(uint4());
  } else if (element == 8) {
    move(uint64_t());
  } else if (element == 4) {
    move(uint32_t());
  } else {
    move(uint16_t());
  }
}

void run_split_column_groups(const CudaKernelArguments& args) {
  move_column_groups<true>(args, args.input(0), args.output(0), args.output(1));
}

void run_join_column_groups(const CudaKernelArguments& args) {
  move_column_groups<false>(args, args.output(0), args.input(0), args.input(1));
}

}  // namespace

CudaKernel split_column_groups_cuda_kernel(const OpView&) {
  return &run_split_column_groups;
}

CudaKernel join_column_groups_cuda_kernel(const OpView&) {
  return &run_join_column_groups;
}

}  // namespace troupe
