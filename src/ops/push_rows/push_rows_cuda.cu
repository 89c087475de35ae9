#include "ops/cuda/peer_rows.cuh"
#include "ops/push_rows/push_rows.h"

namespace troupe {
namespace {

struct ReceivedOfRanks {
  std::array<int32_t*, kMostPeers> of{};
};

__global__ void send_counts_kernel(const int32_t* counts, ReceivedOfRanks received, int rank,
                                   int ranks) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < ranks) received.of[static_cast<size_t>(thread)][rank] = counts[thread];
}

// Every rank has a section of its own on each member.
PeerSections sections_of(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(args.input(0).shape[1] == peers.size(), "pushed rows: another group");
  return {.rank = peers.rank(), .ranks = peers.size(), .tokens = args.input(0).shape[0]};
}

void push(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  ReceivedOfRanks received;
  for (int r = 0; r < peers.size(); ++r) {
    received.of[static_cast<size_t>(r)] = peers.out<int32_t>(r, 0);
  }
  peers.meet(args);
  launch(args, {1, kMostPeers}, send_counts_kernel, args.in<int32_t>(1), received, peers.rank(),
         peers.size());
  for (size_t j = 0; j + 2 < args.inputs.size(); ++j) {
    std::array<std::byte*, kMostPeers> rows{};
    for (int r = 0; r < peers.size(); ++r) {
      rows[static_cast<size_t>(r)] = peers.out<std::byte>(r, static_cast<int>(j) + 1);
    }
    send_rows_to_peers(args, args.inputs[j + 2], args.in<int32_t>(0), sections_of(args),
                       rows.data());
  }
  peers.meet(args);
}

void push_back(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  peers.meet(args);
  for (size_t j = 0; j < args.outputs.size(); ++j) {
    std::array<std::byte*, kMostPeers> rows{};
    for (int r = 0; r < peers.size(); ++r) {
      rows[static_cast<size_t>(r)] = peers.in<std::byte>(r, static_cast<int>(j) + 3);
    }
    const auto* slots = args.in<int32_t>(0);
    switch (args.outputs[j].dtype) {
      case DType::f64:
        sum_rows_of_peers<double>(args, slots, sections_of(args), rows.data(), args.outputs[j]);
        break;
      case DType::f32:
        sum_rows_of_peers<float>(args, slots, sections_of(args), rows.data(), args.outputs[j]);
        break;
      default:
        sum_rows_of_peers<Bf16>(args, slots, sections_of(args), rows.data(), args.outputs[j]);
        break;
    }
  }
  peers.meet(args);
}

}  // namespace

CudaKernel push_rows_cuda_kernel(const OpView&) {
  return &push;
}

CudaKernel push_rows_back_cuda_kernel(const OpView&) {
  return &push_back;
}

}  // namespace troupe
