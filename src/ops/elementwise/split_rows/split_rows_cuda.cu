#include "comm/cuda/peers.h"
#include "ops/elementwise/split_rows/split_rows.h"

namespace troupe {
namespace {

int64_t split_rows_bytes(const CudaTensor& tensor) {
  return tensor.shape.elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

void run_split_rows(const CudaKernelArguments& args) {
  PeerCopies copies(args);
  const auto* from = static_cast<const std::byte*>(args.input(0).data);
  for (const CudaTensor& piece : args.outputs) {
    copies.add(from, piece.data, split_rows_bytes(piece));
    from += split_rows_bytes(piece);
  }
  copies.launch();
}

void run_join_rows(const CudaKernelArguments& args) {
  PeerCopies copies(args);
  auto* to = static_cast<std::byte*>(args.output(0).data);
  for (const CudaTensor& piece : args.inputs) {
    copies.add(piece.data, to, split_rows_bytes(piece));
    to += split_rows_bytes(piece);
  }
  copies.launch();
}

}  // namespace

CudaKernel split_rows_cuda_kernel(const OpView&) {
  return &run_split_rows;
}

CudaKernel join_rows_cuda_kernel(const OpView&) {
  return &run_join_rows;
}

}  // namespace troupe
