#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"

namespace troupe {
namespace {

void scatter(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(peers.size() == args.attributes->as<ReduceScatterAttributes>().ranks,
               "reduce_scatter: the group has another size");
  const CudaTensor& result = args.output(0);
  const int64_t elements = result.shape.elements();
  const std::array<PeerSum, 1> rows = {
      {{.operand = 0,
        .share =
            [elements](int place) {
              return IndexRange{place * elements, (place + 1) * elements};
            },
        .result = static_cast<std::byte*>(result.data)}}};
  peers.barrier(args);
  sum_over_peers(args, result.dtype, rows);
  peers.barrier(args);
}

}  // namespace

CudaKernel reduce_scatter_cuda_kernel(const OpView&) {
  return &scatter;
}

}  // namespace troupe
