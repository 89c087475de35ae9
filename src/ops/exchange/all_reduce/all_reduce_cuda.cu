#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/all_reduce/all_reduce.h"

namespace troupe {
namespace {

// A rank takes the sums of its share of the elements and hands them to all members.
void reduce(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& attributes = args.attributes->as<AllReduceAttributes>();
  peers.barrier(args);
  for (const DType dtype : kSummedDtypes) {
    std::vector<PeerSum> sums;
    for (size_t i = 0; i < args.outputs.size(); ++i) {
      const CudaTensor& tensor = args.outputs[i];
      if (tensor.dtype != dtype) continue;
      const auto operand = static_cast<int>(args.inputs.size() + i);
      sums.push_back({.operand = operand,
                      .share =
                          [&](int place) {
                            return all_reduce_share(tensor.shape, attributes, place, peers.size());
                          },
                      .handed_to = operand});
    }
    sum_over_peers(args, dtype, sums);
  }
  peers.barrier(args);
}

}  // namespace

CudaKernel all_reduce_cuda_kernel(const OpView&) {
  return &reduce;
}

}  // namespace troupe
