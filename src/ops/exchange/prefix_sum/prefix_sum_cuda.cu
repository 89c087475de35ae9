#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

struct Counts {
  std::array<const int32_t*, kMostMembers> of{};  // of each rank
};

__global__ void prefix_sum_kernel(Counts counts, int rank, int ranks, const int32_t* previous,
                                  int32_t* running, int32_t* total, int64_t elements) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    int32_t sum = previous == nullptr ? 0 : previous[i];
    for (int r = 0; r < ranks; ++r) {
      sum += counts.of[static_cast<size_t>(r)][i];
      if (r == rank) running[i] = sum;
    }
    total[i] = sum;
  }
}

void sum(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const int64_t elements = args.input(0).shape.elements();
  peers.barrier(args);
  const std::vector<const std::byte*> addresses =
      read_from_peers(args, 0, elements * static_cast<int64_t>(sizeof(int32_t)));
  Counts counts;
  for (size_t r = 0; r < addresses.size(); ++r) {
    counts.of[r] = reinterpret_cast<const int32_t*>(addresses[r]);
  }
  launch(args, {blocks_for(args, elements, 128), 128}, prefix_sum_kernel, counts, peers.rank(),
         peers.size(), args.in<int32_t>(1), args.out<int32_t>(0), args.out<int32_t>(1), elements);
  peers.barrier(args);
}

}  // namespace

CudaKernel prefix_sum_cuda_kernel(const OpView&) {
  return &sum;
}

}  // namespace troupe
