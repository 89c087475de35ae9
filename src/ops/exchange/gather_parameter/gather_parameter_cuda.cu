#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"

namespace troupe {
namespace {

void gather(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const CudaTensor& whole = args.output(0);
  const auto size = static_cast<int64_t>(size_of(whole.dtype));
  const auto shard = [&](int place) {
    Shard of_place = attributes.shard;
    of_place.place = place;
    return shard_of(attributes.shape, of_place);
  };
  const std::array<PeerGather, 1> shards = {
      {{.operand = 0,
        .block =
            [&](int place) {
              return IndexRange{0, (shard(place).end - shard(place).begin) * size};
            },
        .to =
            [&](int place) {
              return static_cast<std::byte*>(whole.data) + shard(place).begin * size;
            }}}};
  gather_from_peers(args, shards);
}

void sum_gradient(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const CudaTensor& shard = args.output(0);
  const std::array<PeerSum, 1> shards = {
      {{.operand = 0,
        .share =
            [&](int place) {
              return shard_of(attributes.shape, {.place = place, .count = attributes.shard.count});
            },
        .result = static_cast<std::byte*>(shard.data)}}};
  peers.barrier(args);
  sum_over_peers(args, args.input(0).dtype, shards, attributes.accumulate, shard.dtype);
  peers.barrier(args);
}

}  // namespace

CudaKernel gather_parameter_cuda_kernel(const OpView&) {
  return &gather;
}

CudaKernel sum_parameter_gradient_cuda_kernel(const OpView&) {
  return &sum_gradient;
}

}  // namespace troupe
