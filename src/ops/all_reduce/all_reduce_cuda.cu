#include "ops/all_reduce/all_reduce.h"
#include "ops/cuda/peers.h"
#include "program/shard.h"

namespace troupe {
namespace {

// A rank takes the sums of its share of the elements and hands them to all members.
void reduce(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& attributes = args.attributes->as<AllReduceAttributes>();
  peers.meet(args);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
    PeerSums sums(args, dtype, peers.size(), peers.size());
    for (size_t i = 0; i < args.outputs.size(); ++i) {
      const CudaTensor& tensor = args.outputs[i];
      if (tensor.dtype != dtype) continue;
      IndexRange summed = shard_of(tensor.shape, attributes.shard);
      if (attributes.first_row > 0) {
        summed.begin = attributes.first_row * tensor.shape.row_elements();
      }
      const IndexRange share = share_of(summed.end - summed.begin, peers.rank(), peers.size());
      const int64_t first = (summed.begin + share.begin) * static_cast<int64_t>(size_of(dtype));
      const auto at = [&](int place) {
        return peers.out<std::byte>(place, static_cast<int>(i)) + first;
      };
      sums.add(share.end - share.begin, at, at);
    }
    sums.launch();
  }
  peers.meet(args);
}

}  // namespace

CudaKernel all_reduce_cuda_kernel(const OpView&) {
  return &reduce;
}

}  // namespace troupe
