#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "comm/cuda/peer_rows.cuh"
#include "ops/exchange/exchange_rows/exchange_rows.h"

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
  peers.barrier(args);
  const std::vector<const std::byte*> addresses =
      read_from_peers(args, 0, peers.size() * static_cast<int64_t>(sizeof(int32_t)));
  CountsOfRanks counts;
  for (size_t r = 0; r < addresses.size(); ++r) {
    counts.of[r] = reinterpret_cast<const int32_t*>(addresses[r]);
  }
  launch(args, {1, kMostPeers}, exchange_counts_kernel, counts, peers.rank(), peers.size(),
         args.out<int32_t>(0));
  peers.barrier(args);
}

// Rows lie by source on each rank, where its offsets say. In a staged group they travel in sections
// that have room for all tokens; between these and their places they are moved by each rank itself.
PeerSections sections_of(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  PeerSections sections{
      .rank = peers.rank(), .ranks = peers.size(), .tokens = args.input(1).shape[0]};
  TROUPE_CHECK(args.input(1).shape[1] == peers.size(), "exchange of rows: another group");
  for (int r = 0; r < peers.size() && !peers.is_staged(); ++r) {
    sections.offsets[static_cast<size_t>(r)] = peers.in<int32_t>(r, 3);
  }
  return sections;
}

// Of a staged group: sections of rows to send, and after them those received.
struct StagedRows {
  StagedRows(const CudaKernelArguments& args, const CudaTensor& of_tokens)
      : bytes(of_tokens.shape.elements() * static_cast<int64_t>(size_of(of_tokens.dtype))),
        sent(args.staging),
        received(args.staging + staged_section_bytes(bytes, args.peers->size())) {}
  int64_t bytes;  // of a section
  std::byte* sent;
  std::byte* received;
};

void send_staged(const CudaKernelArguments& args) {
  const StagedRows rows(args, args.input(0));
  const int ranks = args.peers->size();
  send_rows_to_peers(args, args.input(0), args.in<int32_t>(1), sections_of(args),
                     section_starts(rows.sent, rows.bytes, args.peers->rank(), ranks).data());
  exchange_sections(args, rows.sent, rows.received, rows.bytes);
  SectionPieces pieces = pieces_of(rows.received, rows.bytes, ranks);
  const int own = args.peers->rank();
  pieces.data[static_cast<size_t>(own)] = rows.sent + own * rows.bytes;
  move_sections</*kPack=*/false>(args, pieces, ranks, args.input(0).shape[0],
                                 static_cast<std::byte*>(args.output(0).data), args.in<int32_t>(3),
                                 rows.bytes);
}

void send(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  if (peers.is_staged()) return send_staged(args);
  std::array<std::byte*, kMostPeers> received{};
  for (int r = 0; r < peers.size(); ++r) {
    received[static_cast<size_t>(r)] = peers.out<std::byte>(r, 0);
  }
  peers.barrier(args);
  send_rows_to_peers(args, args.input(0), args.in<int32_t>(1), sections_of(args), received.data());
  peers.barrier(args);
}

template <class T>
void return_staged(const CudaKernelArguments& args) {
  const StagedRows rows(args, args.output(0));
  const int ranks = args.peers->size();
  const int own = args.peers->rank();
  move_sections</*kPack=*/true>(
      args, pieces_of(rows.sent, rows.bytes, ranks), ranks, args.output(0).shape[0],
      static_cast<std::byte*>(args.input(0).data), args.in<int32_t>(3), rows.bytes);
  exchange_sections(args, rows.sent, rows.received, rows.bytes);
  auto starts = section_starts(rows.received, rows.bytes, own, ranks);
  starts[static_cast<size_t>(own)] = rows.sent;
  sum_rows_of_peers<T>(args, args.in<int32_t>(1), sections_of(args), starts.data(), args.output(0));
}

template <class T>
struct ReturnRows {
  static void run(const CudaKernelArguments& args) {
    const CudaPeers& peers = *args.peers;
    if (peers.is_staged()) return return_staged<T>(args);
    std::array<std::byte*, kMostPeers> rows{};
    for (int r = 0; r < peers.size(); ++r) {
      rows[static_cast<size_t>(r)] = peers.in<std::byte>(r, 0);
    }
    peers.barrier(args);
    sum_rows_of_peers<T>(args, args.in<int32_t>(1), sections_of(args), rows.data(), args.output(0));
    peers.barrier(args);
  }
};

}  // namespace

// Refuses groups that are too large for all three.
CudaKernel exchange_counts_cuda_kernel(const OpView& op) {
  require_peers(op.input(0).shape[0], "rows of tokens travel");
  return &exchange;
}

CudaKernel send_rows_cuda_kernel(const OpView&) {
  return &send;
}

CudaKernel return_rows_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<ReturnRows>(op.output(0).dtype);
}

}  // namespace troupe
