#include "ops/cuda/device.cuh"
#include "ops/split_columns/split_columns.h"

namespace troupe {
namespace {

// Copies `columns` elements of each of `rows` rows, whose beginnings lie `from_stride` and
// `to_stride` elements apart. Element is as wide as the tensor's.
template <class Element>
__global__ void copy_columns_kernel(const Element* from, int64_t from_stride, Element* to,
                                    int64_t to_stride, int64_t rows, int64_t columns) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < rows * columns; i += threads) {
    to[i / columns * to_stride + i % columns] = from[i / columns * from_stride + i % columns];
  }
}

template <class Element>
void copy_columns(const CudaKernelArguments& args, const void* from, int64_t from_stride, void* to,
                  int64_t to_stride, int64_t rows, int64_t columns) {
  launch(args, {blocks_for(rows * columns, 256), 256}, copy_columns_kernel<Element>,
         static_cast<const Element*>(from), from_stride, static_cast<Element*>(to), to_stride, rows,
         columns);
}

template <class Element>
struct Columns {
  static void split(const CudaKernelArguments& args) {
    const Shape& x = args.input(0).shape;
    const int64_t columns = args.output(0).shape[1];
    const auto* from = static_cast<const Element*>(args.input(0).data);
    copy_columns<Element>(args, from, x[1], args.output(0).data, columns, x[0], columns);
    copy_columns<Element>(args, from + columns, x[1], args.output(1).data, x[1] - columns, x[0],
                          x[1] - columns);
  }
  static void join(const CudaKernelArguments& args) {
    const Shape& x = args.output(0).shape;
    const int64_t columns = args.input(0).shape[1];
    auto* to = static_cast<Element*>(args.output(0).data);
    copy_columns<Element>(args, args.input(0).data, columns, to, x[1], x[0], columns);
    copy_columns<Element>(args, args.input(1).data, x[1] - columns, to + columns, x[1], x[0],
                          x[1] - columns);
  }
};

}  // namespace

CudaKernel split_columns_cuda_kernel(const OpView& op) {
  switch (size_of(op.input(0).dtype)) {
    case 8:
      return &Columns<uint64_t>::split;
    case 4:
      return &Columns<uint32_t>::split;
    default:
      return &Columns<uint16_t>::split;
  }
}

CudaKernel join_columns_cuda_kernel(const OpView& op) {
  switch (size_of(op.input(0).dtype)) {
    case 8:
      return &Columns<uint64_t>::join;
    case 4:
      return &Columns<uint32_t>::join;
    default:
      return &Columns<uint16_t>::join;
  }
}

}  // namespace troupe
