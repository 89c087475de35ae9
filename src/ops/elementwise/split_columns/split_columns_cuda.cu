#include "ops/elementwise/split_columns/split_columns.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kColumnLoads = 4;  // of a thread, that are on their way at once

// A block for each row of the wide tensor, of whose `columns` elements `first` are in one narrow
// tensor and the others in another. Split: from wide to narrow; else the other way.
template <class Element, bool kSplit>
__global__ void copy_columns_kernel(Element* wide, Element* left, Element* right, int64_t columns,
                                    int64_t first) {
  const int64_t row = blockIdx.x;
  wide += row * columns;
  left += row * first;
  right += row * (columns - first);
  const auto narrow = [=](int64_t i) { return i < first ? left + i : right + (i - first); };
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < columns; i += int64_t{kColumnLoads} * blockDim.x) {
    Element copied[kColumnLoads];
#pragma unroll
    for (int j = 0; j < kColumnLoads; ++j) {
      const int64_t at = i + j * blockDim.x;
      if (at < columns) copied[j] = kSplit ? wide[at] : *narrow(at);
    }
#pragma unroll
    for (int j = 0; j < kColumnLoads; ++j) {
      const int64_t at = i + j * blockDim.x;
      if (at < columns) *(kSplit ? narrow(at) : wide + at) = copied[j];
    }
  }
}

// Moved in elements as wide as all rows allow.
template <bool kSplit>
void copy_columns(const CudaKernelArguments& args, const CudaTensor& wide, const CudaTensor& left,
                  const CudaTensor& right) {
  const auto element = static_cast<int64_t>(size_of(wide.dtype));
  const int64_t bytes = wide.shape[1] * element;
  const int64_t first = left.shape[1] * element;
  const auto copy = [&]<class Element>(Element) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Element));
    launch(args, {static_cast<unsigned>(wide.shape[0]), threads_for_row(bytes / kBytes, 2)},
           copy_columns_kernel<Element, kSplit>, static_cast<Element*>(wide.data),
           static_cast<Element*>(left.data), static_cast<Element*>(right.data), bytes / kBytes,
           first / kBytes);
  };
  if (bytes % 16 == 0 && first % 16 == 0) {
    copy(uint4());
  } else if (element == 8) {
    copy(uint64_t());
  } else if (element == 4) {
    copy(uint32_t());
  } else {
    copy(uint16_t());
  }
}

void run_split_columns(const CudaKernelArguments& args) {
  copy_columns<true>(args, args.input(0), args.output(0), args.output(1));
}

void run_join_columns(const CudaKernelArguments& args) {
  copy_columns<false>(args, args.output(0), args.input(0), args.input(1));
}

}  // namespace

CudaKernel split_columns_cuda_kernel(const OpView&) {
  return &run_split_columns;
}

CudaKernel join_columns_cuda_kernel(const OpView&) {
  return &run_join_columns;
}

}  // namespace troupe
