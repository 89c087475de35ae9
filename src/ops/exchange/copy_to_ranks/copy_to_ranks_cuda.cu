#include "comm/cuda/peers.h"
#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"

namespace troupe {
namespace {

void copy(const CudaKernelArguments& args) {
  const CudaTensor& x = args.input(0);
  if (args.output(0).data == x.data) return;
  PeerCopies copies(args);
  copies.add(x.data, args.output(0).data,
             x.shape.elements() * static_cast<int64_t>(size_of(x.dtype)));
  copies.launch();
}

}  // namespace

CudaKernel copy_to_ranks_cuda_kernel(const OpView&) {
  return &copy;
}

}  // namespace troupe
