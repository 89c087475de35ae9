#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "comm/cuda/peer_rows.cuh"
#include "ops/exchange/push_rows/push_rows.h"

namespace troupe {
namespace {

struct ReceivedOfRanks {
  std::array<int32_t*, kMostPeers> of{};
};

__global__ void send_counts_kernel(const int32_t* counts, ReceivedOfRanks received, int rank,
                                   int ranks) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= ranks) return;
  int32_t* const of_thread = received.of[static_cast<size_t>(thread)];
  if (of_thread != nullptr) of_thread[rank] = counts[thread];
}

// Every rank has a section of its own on each member.
PeerSections sections_of(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(args.input(0).shape[1] == peers.size(), "pushed rows: another group");
  return {.rank = peers.rank(), .ranks = peers.size(), .tokens = args.input(0).shape[0]};
}

int64_t section_bytes(const CudaTensor& of_tokens) {
  return of_tokens.shape.elements() * static_cast<int64_t>(size_of(of_tokens.dtype));
}

// Of a staged group: a count to each member, and theirs from them.
void push_counts(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  std::vector<PeerBlock> sends;
  std::vector<PeerBlock> receives;
  for (int r = 0; r < peers.size(); ++r) {
    if (r == peers.rank()) continue;
    sends.push_back({r, peers.in<int32_t>(peers.rank(), 1) + r, sizeof(int32_t)});
    receives.push_back({r, peers.out<int32_t>(peers.rank(), 0) + r, sizeof(int32_t)});
  }
  peers.exchange(args, sends, receives);
}

void push(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  ReceivedOfRanks received;
  for (int r = 0; r < peers.size(); ++r) {
    received.of[static_cast<size_t>(r)] = peers.out<int32_t>(r, 0);
  }
  peers.barrier(args);
  launch(args, {1, kMostPeers}, send_counts_kernel, args.in<int32_t>(1), received, peers.rank(),
         peers.size());
  if (peers.is_staged()) push_counts(args);
  for (size_t j = 0; j + 2 < args.inputs.size(); ++j) {
    const int64_t bytes = section_bytes(args.inputs[j + 2]);
    auto rows = section_starts(args.staging, bytes, peers.rank(), peers.size());
    for (int r = 0; r < peers.size(); ++r) {
      if (peers.is_staged() && r != peers.rank()) continue;
      rows[static_cast<size_t>(r)] = peers.out<std::byte>(r, static_cast<int>(j) + 1);
    }
    send_rows_to_peers(args, args.inputs[j + 2], args.in<int32_t>(0), sections_of(args),
                       rows.data());
    if (peers.is_staged()) {
      exchange_sections(args, args.staging, static_cast<std::byte*>(args.outputs[j + 1].data),
                        bytes);
    }
  }
  peers.barrier(args);
}

void push_back(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  peers.barrier(args);
  for (size_t j = 0; j < args.outputs.size(); ++j) {
    const int64_t bytes = section_bytes(args.outputs[j]);
    if (peers.is_staged()) {
      exchange_sections(args, static_cast<std::byte*>(args.inputs[j + 3].data), args.staging,
                        bytes);
    }
    auto rows = section_starts(args.staging, bytes, peers.rank(), peers.size());
    for (int r = 0; r < peers.size(); ++r) {
      if (peers.is_staged() && r != peers.rank()) continue;
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
      case DType::f16:
        sum_rows_of_peers<F16>(args, slots, sections_of(args), rows.data(), args.outputs[j]);
        break;
      default:
        sum_rows_of_peers<Bf16>(args, slots, sections_of(args), rows.data(), args.outputs[j]);
        break;
    }
  }
  peers.barrier(args);
}

}  // namespace

CudaKernel push_rows_cuda_kernel(const OpView& op) {
  require_peers(op.input(0).shape[1], "rows of tokens travel");
  return &push;
}

CudaKernel push_rows_back_cuda_kernel(const OpView& op) {
  require_peers(op.input(0).shape[1], "rows of tokens travel");
  return &push_back;
}

}  // namespace troupe
