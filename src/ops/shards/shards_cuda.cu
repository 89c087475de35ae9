#include "ops/cuda/peers.h"
#include "ops/shards/shards.h"
#include "program/shard.h"

namespace troupe {
namespace {

IndexRange shard_bytes(const CudaTensor& tensor, int place, int ranks) {
  const IndexRange shard = shard_of(tensor.shape, {.place = place, .count = ranks});
  const auto size = static_cast<int64_t>(size_of(tensor.dtype));
  return {shard.begin * size, shard.end * size};
}

// A rank writes its own shards only, and nobody else reads them.
void reduce(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  peers.meet(args);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
    PeerSums sums(args, dtype, peers.size(), 1);
    for (size_t i = 0; i < args.outputs.size(); ++i) {
      const CudaTensor& tensor = args.outputs[i];
      if (tensor.dtype != dtype) continue;
      const IndexRange bytes = shard_bytes(tensor, peers.rank(), peers.size());
      sums.add(
          (bytes.end - bytes.begin) / static_cast<int64_t>(size_of(dtype)),
          [&](int place) { return peers.out<std::byte>(place, static_cast<int>(i)) + bytes.begin; },
          [&](int) { return static_cast<std::byte*>(tensor.data) + bytes.begin; });
    }
    sums.launch();
  }
  peers.meet(args);
}

// A rank writes what is not its own, and the others read its own.
void gather(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  peers.meet(args);
  PeerCopies copies(args);
  for (int step = 1; step < peers.size(); ++step) {
    const int place = (peers.rank() + step) % peers.size();
    for (size_t i = 0; i < args.outputs.size(); ++i) {
      const IndexRange bytes = shard_bytes(args.outputs[i], place, peers.size());
      copies.add(peers.out<std::byte>(place, static_cast<int>(i)) + bytes.begin,
                 static_cast<std::byte*>(args.outputs[i].data) + bytes.begin,
                 bytes.end - bytes.begin);
    }
  }
  copies.launch();
  peers.meet(args);
}

}  // namespace

CudaKernel reduce_shards_cuda_kernel(const OpView&) {
  return &reduce;
}

CudaKernel gather_shards_cuda_kernel(const OpView&) {
  return &gather;
}

}  // namespace troupe
