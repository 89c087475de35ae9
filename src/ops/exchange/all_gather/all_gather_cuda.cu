#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/all_gather/all_gather.h"

namespace troupe {
namespace {

void gather(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(peers.size() == args.attributes->as<AllGatherAttributes>().ranks,
               "all_gather: the group has another size");
  const CudaTensor& own = args.input(0);
  const int64_t bytes = own.shape.elements() * static_cast<int64_t>(size_of(own.dtype));
  auto* const gathered = static_cast<std::byte*>(args.output(0).data);
  const std::array<PeerGather, 1> rows = {
      {{.operand = 0,
        .block =
            [bytes](int) {
              return IndexRange{0, bytes};
            },
        .to = [=](int place) { return gathered + place * bytes; }}}};
  gather_from_peers(args, rows);
}

}  // namespace

CudaKernel all_gather_cuda_kernel(const OpView&) {
  return &gather;
}

}  // namespace troupe
