#include "ops/cuda/peers.h"
#include "ops/sum_over_ranks/sum_over_ranks.h"
#include "program/shard.h"

namespace troupe {
namespace {

// A rank takes the sums of its share of the elements and hands them to all members.
void sum(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const CudaTensor& x = args.input(0);
  const IndexRange share = share_of(x.shape.elements(), peers.rank(), peers.size());
  const int64_t first = share.begin * static_cast<int64_t>(size_of(x.dtype));
  peers.meet(args);
  PeerSums sums(args, x.dtype, peers.size(), peers.size());
  sums.add(
      share.end - share.begin, [&](int place) { return peers.in<std::byte>(place, 0) + first; },
      [&](int place) { return peers.out<std::byte>(place, 0) + first; });
  sums.launch();
  peers.meet(args);
}

}  // namespace

CudaKernel sum_over_ranks_cuda_kernel(const OpView&) {
  return &sum;
}

}  // namespace troupe
