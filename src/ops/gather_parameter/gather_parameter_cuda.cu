#include "ops/cuda/peers.h"
#include "ops/gather_parameter/gather_parameter.h"

namespace troupe {
namespace {

void gather(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const CudaTensor& whole = args.output(0);
  const auto size = static_cast<int64_t>(size_of(whole.dtype));
  peers.meet(args);
  PeerCopies copies(args);
  for (int step = 0; step < peers.size(); ++step) {
    const int place = (peers.rank() + step) % peers.size();
    const IndexRange shard =
        shard_of(attributes.shape, {.place = place, .count = attributes.shard.count});
    copies.add(peers.in<std::byte>(place, 0),
               static_cast<std::byte*>(whole.data) + shard.begin * size,
               (shard.end - shard.begin) * size);
  }
  copies.launch();
  peers.meet(args);
}

void sum_gradient(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& attributes = args.attributes->as<GatherParameterAttributes>();
  const IndexRange own = shard_of(attributes.shape, attributes.shard);
  const CudaTensor& shard = args.output(0);
  const DType terms = args.input(0).dtype;
  const int64_t first = own.begin * static_cast<int64_t>(size_of(terms));
  peers.meet(args);
  PeerSums sums(args, terms, peers.size(), 1, attributes.accumulate, shard.dtype);
  sums.add(
      own.end - own.begin, [&](int place) { return peers.in<std::byte>(place, 0) + first; },
      [&](int) { return shard.data; });
  sums.launch();
  peers.meet(args);
}

}  // namespace

CudaKernel gather_parameter_cuda_kernel(const OpView&) {
  return &gather;
}

CudaKernel sum_parameter_gradient_cuda_kernel(const OpView&) {
  return &sum_gradient;
}

}  // namespace troupe
