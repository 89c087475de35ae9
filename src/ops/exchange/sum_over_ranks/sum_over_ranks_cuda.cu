#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "program/shard.h"

namespace troupe {
namespace {

// A rank takes the sums of its share of the elements and hands them to all members.
void sum(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const CudaTensor& x = args.input(0);
  const std::array<PeerSum, 1> shares = {
      {{.operand = 0,
        .share = [&](int place) { return share_of(x.shape.elements(), place, peers.size()); },
        .handed_to = 1}}};
  peers.barrier(args);
  sum_over_peers(args, x.dtype, shares);
  peers.barrier(args);
}

}  // namespace

CudaKernel sum_over_ranks_cuda_kernel(const OpView&) {
  return &sum;
}

}  // namespace troupe
