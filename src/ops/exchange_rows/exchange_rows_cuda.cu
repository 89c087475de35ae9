#include "ops/cuda/peer_rows.cuh"
#include "ops/exchange_rows/exchange_rows.h"

namespace troupe {
namespace {

struct CountsOfRanks {
  std::array<const int32_t*, kMostPeers> of{};
};

__global__ void exchange_counts_kernel(CountsOfRanks counts, int rank, int ranks,
                                       int32_t* offsets) {
  __shared__ int32_t received[kMostPeers];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < ranks) received[thread] = counts.of[static_cast<size_t>(thread)][rank];
  __syncthreads();
  if (thread != 0) return;
  int32_t sum = 0;
  offsets[0] = 0;
  for (int r = 0; r < ranks; ++r) {
    sum += received[r];
    offsets[r + 1] = sum;
  }
}

void exchange(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  CountsOfRanks counts;
  for (int r = 0; r < peers.size(); ++r) {
    counts.of[static_cast<size_t>(r)] = peers.in<int32_t>(r, 0);
  }
  peers.meet(args);
  launch(args, {1, kMostPeers}, exchange_counts_kernel, counts, peers.rank(), peers.size(),
         args.out<int32_t>(0));
  peers.meet(args);
}

// Rows lie by source on each rank, where its offsets say.
PeerSections sections_of(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  PeerSections sections{
      .rank = peers.rank(), .ranks = peers.size(), .tokens = args.input(1).shape[0]};
  TROUPE_CHECK(args.input(1).shape[1] == peers.size(), "exchange of rows: another group");
  for (int r = 0; r < peers.size(); ++r) {
    sections.offsets[static_cast<size_t>(r)] = peers.in<int32_t>(r, 3);
  }
  return sections;
}

void send(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  std::array<std::byte*, kMostPeers> received{};
  for (int r = 0; r < peers.size(); ++r) {
    received[static_cast<size_t>(r)] = peers.out<std::byte>(r, 0);
  }
  peers.meet(args);
  send_rows_to_peers(args, args.input(0), args.in<int32_t>(1), sections_of(args), received.data());
  peers.meet(args);
}

template <class T>
struct ReturnRows {
  static void run(const CudaKernelArguments& args) {
    const CudaPeers& peers = *args.peers;
    std::array<std::byte*, kMostPeers> rows{};
    for (int r = 0; r < peers.size(); ++r) {
      rows[static_cast<size_t>(r)] = peers.in<std::byte>(r, 0);
    }
    peers.meet(args);
    sum_rows_of_peers<T>(args, args.in<int32_t>(1), sections_of(args), rows.data(), args.output(0));
    peers.meet(args);
  }
};

}  // namespace

CudaKernel exchange_counts_cuda_kernel(const OpView&) {
  return &exchange;
}

CudaKernel send_rows_cuda_kernel(const OpView&) {
  return &send;
}

CudaKernel return_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<ReturnRows>(op.output(0).dtype);
}

}  // namespace troupe
