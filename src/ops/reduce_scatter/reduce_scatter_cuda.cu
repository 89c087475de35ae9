#include "ops/cuda/peers.h"
#include "ops/reduce_scatter/reduce_scatter.h"

namespace troupe {
namespace {

void scatter(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(peers.size() == args.attributes->as<ReduceScatterAttributes>().ranks,
               "reduce_scatter: the group has another size");
  const CudaTensor& result = args.output(0);
  const int64_t elements = result.shape.elements();
  const int64_t first = peers.rank() * elements * static_cast<int64_t>(size_of(result.dtype));
  peers.meet(args);
  PeerSums sums(args, result.dtype, peers.size(), 1);
  sums.add(
      elements, [&](int place) { return peers.in<std::byte>(place, 0) + first; },
      [&](int) { return result.data; });
  sums.launch();
  peers.meet(args);
}

}  // namespace

CudaKernel reduce_scatter_cuda_kernel(const OpView&) {
  return &scatter;
}

}  // namespace troupe
