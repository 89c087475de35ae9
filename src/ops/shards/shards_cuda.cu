#include <vector>

#include "ops/cuda/peer_exchange.h"
#include "ops/shards/shards.h"
#include "program/shard.h"

namespace troupe {
namespace {

IndexRange shard_bytes(const CudaTensor& tensor, int place, int ranks) {
  const IndexRange shard = shard_of(tensor.shape, {.place = place, .count = ranks});
  const auto size = static_cast<int64_t>(size_of(tensor.dtype));
  return {shard.begin * size, shard.end * size};
}

// A rank writes its own shards only, and no other rank reads them.
void reduce(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  peers.barrier(args);
  for (const DType dtype : kSummedDtypes) {
    std::vector<PeerSum> sums;
    for (size_t i = 0; i < args.outputs.size(); ++i) {
      const CudaTensor& tensor = args.outputs[i];
      if (tensor.dtype != dtype) continue;
      const IndexRange own = shard_bytes(tensor, peers.rank(), peers.size());
      sums.push_back({.operand = static_cast<int>(args.inputs.size() + i),
                      .share =
                          [&](int place) {
                            return shard_of(tensor.shape, {.place = place, .count = peers.size()});
                          },
                      .result = static_cast<std::byte*>(tensor.data) + own.begin});
    }
    sum_over_peers(args, dtype, sums);
  }
  peers.barrier(args);
}

// A rank writes what is not its own, and the others read its own.
void gather(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  std::vector<PeerGather> shards;
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    const CudaTensor& tensor = args.outputs[i];
    const auto bytes = [&](int place) { return shard_bytes(tensor, place, peers.size()); };
    shards.push_back({.operand = static_cast<int>(args.inputs.size() + i),
                      .block = bytes,
                      .to = [&tensor, bytes](int place) {
                        return static_cast<std::byte*>(tensor.data) + bytes(place).begin;
                      }});
  }
  gather_from_peers(args, shards);
}

}  // namespace

CudaKernel reduce_shards_cuda_kernel(const OpView&) {
  return &reduce;
}

CudaKernel gather_shards_cuda_kernel(const OpView&) {
  return &gather;
}

}  // namespace troupe
