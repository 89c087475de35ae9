#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "ops/optimizer/shards/shards.h"
#include "program/shard.h"

namespace troupe {
namespace {

// Shard number `place` of output number `i`.
IndexRange shard_elements(const CudaKernelArguments& args, size_t i, int place) {
  const int32_t owner = owner_of(args.attributes->as<ShardsAttributes>().owners(), i);
  return shard_of(args.outputs[i].shape,
                  {.place = place, .count = args.peers->size(), .owner = owner});
}

IndexRange shard_bytes(const CudaKernelArguments& args, size_t i, int place) {
  const CudaTensor& tensor = args.outputs[i];
  const IndexRange shard = shard_elements(args, i, place);
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
      const IndexRange own = shard_bytes(args, i, peers.rank());
      sums.push_back({.operand = static_cast<int>(args.inputs.size() + i),
                      .share = [&args, i](int place) { return shard_elements(args, i, place); },
                      .result = static_cast<std::byte*>(tensor.data) + own.begin});
    }
    sum_over_peers(args, dtype, sums);
  }
  peers.barrier(args);
}

// A rank writes what is not its own, and the others read its own.
void gather(const CudaKernelArguments& args) {
  std::vector<PeerGather> shards;
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    const CudaTensor& tensor = args.outputs[i];
    const auto bytes = [&args, i](int place) { return shard_bytes(args, i, place); };
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
