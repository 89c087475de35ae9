#include "ops/experts/row_stash/row_stash.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kThreads = 256;

// A ragged tensor as bytes.
struct Bytes {
  LiveRows rows;
  int64_t row_bytes = 0;

  explicit Bytes(const CudaTensor& tensor)
      : rows(tensor),
        row_bytes(tensor.shape.row_elements() * static_cast<int64_t>(size_of(tensor.dtype))) {}
  __device__ int64_t count() const { return rows.count() * row_bytes; }
  __device__ int64_t pages(int64_t page_bytes) const {
    return (count() + page_bytes - 1) / page_bytes;
  }
};

__global__ void open_stash_kernel(int32_t* free, int64_t pages) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (thread == 0) {
    free[kFreePages] = static_cast<int32_t>(pages);
    free[kWantedPages] = 0;
  }
  for (int64_t i = thread; i < pages; i += threads) {
    free[kFirstFreePage + i] = static_cast<int32_t>(i);
  }
}

// One block.
__global__ void take_pages_kernel(Bytes x, int64_t page_bytes, int32_t* table, int32_t* free,
                                  double* lacked, double* most) {
  const int32_t there = free[kFreePages];
  const int64_t wanted = x.pages(page_bytes);
  const int64_t taken = wanted < there ? wanted : there;
  const int32_t* top = free + kFirstFreePage + (there - taken);
  for_row(wanted, [=](int64_t i) { table[i] = i < taken ? top[taken - 1 - i] : -1; });
  __syncthreads();
  if (threadIdx.x > 0) return;
  free[kFreePages] = static_cast<int32_t>(there - taken);
  const int32_t all = free[kWantedPages] + static_cast<int32_t>(wanted);
  free[kWantedPages] = all;
  if (taken < wanted) *lacked += 1;
  if (all > *most) *most = all;
}

// One block.
__global__ void return_pages_kernel(Bytes y, int64_t page_bytes, const int32_t* table,
                                    int32_t* free) {
  const int32_t there = free[kFreePages];
  const int64_t wanted = y.pages(page_bytes);
  __syncthreads();
  // The table's pages come before its gaps: whose page is the last one knows how many there are.
  for_row(wanted, [=](int64_t i) {
    if (table[i] < 0) return;
    free[kFirstFreePage + there + i] = table[i];
    if (i + 1 == wanted || table[i + 1] < 0) {
      free[kFreePages] = there + static_cast<int32_t>(i + 1);
    }
  });
  if (threadIdx.x == 0) free[kWantedPages] -= static_cast<int32_t>(wanted);
}

// A block copies one page after the other, in packs; the last bytes of the tensor one by one. Zeros
// where there is no page, into the tensor.
template <bool kIntoPages>
__global__ void copy_pages_kernel(Bytes tensor, std::byte* data, std::byte* pages,
                                  int64_t page_bytes, const int32_t* table) {
  const int64_t bytes = tensor.count();
  for (int64_t i = blockIdx.x; i * page_bytes < bytes; i += gridDim.x) {
    const int32_t page = table[i];
    const int64_t begin = i * page_bytes;
    const int64_t count = bytes - begin < page_bytes ? bytes - begin : page_bytes;
    std::byte* const own = data + begin;
    std::byte* const packed = pages + (page < 0 ? 0 : page) * page_bytes;
    if (kIntoPages && page < 0) continue;
    const std::byte* const source = kIntoPages ? own : packed;
    std::byte* const target = kIntoPages ? packed : own;
    for_row(count / 16, [=](int64_t j) {
      const auto* from = reinterpret_cast<const uint4*>(source) + j;
      reinterpret_cast<uint4*>(target)[j] = page < 0 ? uint4{0, 0, 0, 0} : *from;
    });
    for_row(count % 16, [=](int64_t j) {
      const int64_t at = count - count % 16 + j;
      target[at] = page < 0 ? std::byte{0} : source[at];
    });
  }
}

template <bool kIntoPages>
void copy_pages(const CudaKernelArguments& args, const CudaTensor& tensor, void* pages,
                int64_t page_bytes, const int32_t* table) {
  const Bytes bytes(tensor);
  const int64_t expected = pages_of(bytes.rows.expected * bytes.row_bytes, page_bytes);
  launch(args, {blocks_for(args, expected, 1), kThreads}, copy_pages_kernel<kIntoPages>, bytes,
         static_cast<std::byte*>(tensor.data), static_cast<std::byte*>(pages), page_bytes, table);
}

void open(const CudaKernelArguments& args) {
  const int64_t pages = args.output(0).shape[0];
  launch(args, {blocks_for(args, pages, kThreads), kThreads}, open_stash_kernel,
         args.out<int32_t>(1), pages);
}

void stash(const CudaKernelArguments& args) {
  const int64_t page_bytes = args.input(1).shape[1];
  launch(args, {1, kThreads}, take_pages_kernel, Bytes(args.input(0)), page_bytes,
         args.out<int32_t>(0), args.out<int32_t>(2), args.out<double>(3), args.out<double>(4));
  copy_pages<true>(args, args.input(0), args.output(1).data, page_bytes, args.out<int32_t>(0));
}

void unstash(const CudaKernelArguments& args) {
  const int64_t page_bytes = args.input(1).shape[1];
  const auto* table = args.in<int32_t>(0);
  copy_pages<false>(args, args.output(0), args.input(1).data, page_bytes, table);
  launch(args, {1, kThreads}, return_pages_kernel, Bytes(args.output(0)), page_bytes, table,
         args.out<int32_t>(1));
}

}  // namespace

CudaKernel open_stash_cuda_kernel(const OpView&) {
  return &open;
}

CudaKernel stash_cuda_kernel(const OpView&) {
  return &stash;
}

CudaKernel unstash_cuda_kernel(const OpView&) {
  return &unstash;
}

}  // namespace troupe
