#include "comm/cuda/peer_exchange.h"

#include <algorithm>

namespace troupe {
namespace {

// All blocks of one size, one after the other.
bool is_whole(const PeerGather& gather, int ranks) {
  const int64_t bytes = gather.block(0).end - gather.block(0).begin;
  for (int place = 1; place < ranks; ++place) {
    const IndexRange block = gather.block(place);
    if (block.end - block.begin != bytes || gather.to(place) != gather.to(0) + place * bytes) {
      return false;
    }
  }
  return true;
}

void gather_staged(const CudaKernelArguments& args, std::span<const PeerGather> gathers) {
  const CudaPeers& peers = *args.peers;
  const int rank = peers.rank();
  std::vector<PeerBlock> sends;
  std::vector<PeerBlock> receives;
  std::vector<PeerWhole> wholes;
  PeerCopies copies(args);
  for (const PeerGather& gather : gathers) {
    const IndexRange block = gather.block(rank);
    const int64_t bytes = block.end - block.begin;
    std::byte* const own = peers.operand(rank, gather.operand) + block.begin;
    if (is_whole(gather, peers.size())) {
      if (bytes > 0) wholes.push_back({.own = own, .all = gather.to(0), .bytes = bytes});
      continue;
    }
    if (own != gather.to(rank)) copies.add(own, gather.to(rank), bytes);
    for (int place = 0; place < peers.size(); ++place) {
      if (place == rank) continue;
      const IndexRange theirs = gather.block(place);
      if (bytes > 0) sends.push_back({.place = place, .data = own, .bytes = bytes});
      if (theirs.end > theirs.begin) {
        receives.push_back(
            {.place = place, .data = gather.to(place), .bytes = theirs.end - theirs.begin});
      }
    }
  }
  copies.launch();
  peers.exchange(args, sends, receives, wholes);
}

// One round of sums in a staged group.
struct StagedRound {
  const CudaKernelArguments& args;
  DType dtype;
  std::span<const PeerSum> tensors;
  const std::vector<StagedTerms>& round;

  const CudaPeers& peers() const { return *args.peers; }
  int64_t size() const { return static_cast<int64_t>(size_of(dtype)); }
  const PeerSum& tensor_of(const StagedTerms& terms) const { return tensors[terms.tensor]; }
  IndexRange part(const StagedTerms& terms, int place) const {
    return part_of(terms, tensor_of(terms).share(place));
  }
  int64_t bytes(const StagedTerms& terms, int place) const {
    const IndexRange range = part(terms, place);
    return (range.end - range.begin) * size();
  }
  // Elements of this rank's tensor that a member sums.
  std::byte* in(int operand, const StagedTerms& terms, int place) const {
    return peers().operand(peers().rank(), operand) + part(terms, place).begin * size();
  }

  void bring_terms() const {
    std::vector<PeerBlock> sends;
    std::vector<PeerBlock> receives;
    for (const StagedTerms& terms : round) {
      for (int place = 0; place < peers().size(); ++place) {
        if (place == peers().rank()) continue;
        add(sends, place, in(tensor_of(terms).operand, terms, place), bytes(terms, place));
        add(receives, place, args.staging + terms.offset + place * terms.stride,
            bytes(terms, peers().rank()));
      }
    }
    peers().exchange(args, sends, receives);
  }

  void hand_out_sums() const {
    std::vector<PeerBlock> sends;
    std::vector<PeerBlock> receives;
    const int rank = peers().rank();
    for (const StagedTerms& terms : round) {
      const int operand = tensor_of(terms).handed_to;
      for (int place = 0; place < peers().size(); ++place) {
        if (place == rank) continue;
        add(sends, place, in(operand, terms, rank), bytes(terms, rank));
        add(receives, place, in(operand, terms, place), bytes(terms, place));
      }
    }
    peers().exchange(args, sends, receives);
  }

  static void add(std::vector<PeerBlock>& blocks, int place, std::byte* data, int64_t bytes) {
    if (bytes > 0) blocks.push_back({.place = place, .data = data, .bytes = bytes});
  }
};

}  // namespace

void gather_from_peers(const CudaKernelArguments& args, std::span<const PeerGather> blocks) {
  const CudaPeers& peers = *args.peers;
  if (peers.is_staged()) return gather_staged(args, blocks);
  peers.barrier(args);
  PeerCopies copies(args);
  for (int step = 0; step < peers.size(); ++step) {
    const int place = (peers.rank() + step) % peers.size();
    for (const PeerGather& gather : blocks) {
      const IndexRange block = gather.block(place);
      const std::byte* const from = peers.operand(place, gather.operand) + block.begin;
      std::byte* const to = gather.to(place);
      if (from != to) copies.add(from, to, block.end - block.begin);
    }
  }
  copies.launch();
  peers.barrier(args);
}

std::vector<const std::byte*> read_from_peers(const CudaKernelArguments& args, int operand,
                                              int64_t bytes) {
  const CudaPeers& peers = *args.peers;
  std::vector<const std::byte*> addresses(static_cast<size_t>(peers.size()));
  std::vector<PeerBlock> sends;
  std::vector<PeerBlock> receives;
  for (int place = 0; place < peers.size(); ++place) {
    const std::byte*& address = addresses[static_cast<size_t>(place)];
    address = peers.operand(place, operand);
    if (!peers.is_staged() || place == peers.rank()) continue;
    std::byte* const staged = args.staging + place * align_staging(bytes);
    address = staged;
    sends.push_back({place, peers.operand(peers.rank(), operand), bytes});
    receives.push_back({place, staged, bytes});
  }
  if (peers.is_staged()) peers.exchange(args, sends, receives);
  return addresses;
}

void sum_over_peers(const CudaKernelArguments& args, DType dtype, std::span<const PeerSum> tensors,
                    bool accumulate, std::optional<DType> result_dtype) {
  if (tensors.empty()) return;
  const CudaPeers& peers = *args.peers;
  const int rank = peers.rank();
  const bool is_handed = tensors.front().handed_to >= 0;
  const auto size = static_cast<int64_t>(size_of(dtype));
  if (!peers.is_staged()) {
    PeerSums sums(args, dtype, peers.size(), is_handed ? peers.size() : 1, accumulate,
                  result_dtype);
    for (const PeerSum& tensor : tensors) {
      const IndexRange share = tensor.share(rank);
      const int64_t first = share.begin * size;
      sums.add(
          share.end - share.begin,
          [&](int place) { return peers.operand(place, tensor.operand) + first; },
          [&](int place) {
            return is_handed ? peers.operand(place, tensor.handed_to) + first : tensor.result;
          });
    }
    sums.launch();
    return;
  }
  std::vector<ShareOf> shares;
  for (const PeerSum& tensor : tensors) shares.push_back(tensor.share);
  const auto result_size = static_cast<int64_t>(size_of(result_dtype.value_or(dtype)));
  for (const std::vector<StagedTerms>& terms_of_round :
       staged_rounds(shares, dtype, peers.size())) {
    const StagedRound round{args, dtype, tensors, terms_of_round};
    round.bring_terms();
    PeerSums sums(args, dtype, peers.size(), 1, accumulate, result_dtype);
    for (const StagedTerms& terms : terms_of_round) {
      const PeerSum& tensor = round.tensor_of(terms);
      sums.add(
          round.bytes(terms, rank) / size,
          [&](int place) {
            return place == rank ? round.in(tensor.operand, terms, rank)
                                 : args.staging + terms.offset + place * terms.stride;
          },
          [&](int) {
            return is_handed ? round.in(tensor.handed_to, terms, rank)
                             : tensor.result + terms.first * result_size;
          });
    }
    sums.launch();
    if (is_handed) round.hand_out_sums();
  }
}

void exchange_sections(const CudaKernelArguments& args, std::byte* sends, std::byte* receives,
                       int64_t bytes) {
  const CudaPeers& peers = *args.peers;
  std::vector<PeerBlock> sent;
  std::vector<PeerBlock> received;
  for (int place = 0; place < peers.size() && bytes > 0; ++place) {
    if (place == peers.rank()) continue;
    sent.push_back({place, sends + place * bytes, bytes});
    received.push_back({place, receives + place * bytes, bytes});
  }
  peers.exchange(args, sent, received);
}

}  // namespace troupe
