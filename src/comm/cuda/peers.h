// How the kernels of operations between ranks reach the GPUs of the other ranks: what Communicator
// (program/communicator.h) is to CPU kernels. Only in builds with CUDA.
//
// Usually all GPUs of a group map each other's memory, and every rank knows where the operands of
// each of its collectives lie on all members: addresses are those of the memory plans and never
// change. So a collective is a barrier, kernels that read or write the memory of others, and a
// barrier after which each rank may use its memory again. A message is posted by its sender and
// fetched by its receiver. Everything runs on the stream, in the order of the program, and can be
// captured: what counts barriers and messages lies on the GPU. The host takes no part.
//
// A group is "staged" where they do not, as those of several machines: what one member needs of
// another is then sent and received through NCCL (nccl_group.h), with sizes that the host knows.
// A barrier does nothing there; only addresses of the rank's own memory are known, and what comes
// from others lies in its staging memory. Kernels are the same: they are given one or the other
// address. Helpers for what most operations do are in peer_exchange.h.
//
// Order of sums, as everywhere: ascending rank, element by element, in the accumulation dtype,
// rounded once.
//
// A GPU that waits for a member longer than the limit writes that down for its host (PeerFault) and
// goes on without: what it computes from there on is worthless, and all later waits are over at
// once. The interpreter must check for a fault after each run.
//
// A waiting kernel is one small block, so that ranks can share a GPU. In the first run the host
// waits instead: see wait_on_host().
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "comm/cuda/peer_blocks.h"
#include "program/cuda_kernel.h"

namespace troupe {

class NcclGroup;  // comm/cuda/nccl_group.h
struct Op;

inline constexpr int kMostPeers = 64;      // members of a group that reach each other's memory
inline constexpr int kMostMembers = 1024;  // of a staged group

// Of operations that address members one by one, staged or not: refuses groups of more than
// kMostPeers ranks. `what`: "rows of tokens travel".
void require_peers(int64_t ranks, const char* what);

// On each GPU, one for each kind of group: what the members tell each other, and what the rank
// counts itself. All zero at first.
struct PeerBoard {
  // Written by the others, each in its place.
  std::array<uint32_t, kMostPeers> arrived;  // barriers that the member has reached
  std::array<uint32_t, kMostPeers> posted;   // messages that it has sent here
  std::array<uint32_t, kMostPeers> fetched;  // messages from here that it has
  // Written by the rank itself.
  uint32_t barriers;
  std::array<uint32_t, kMostPeers> sends;     // by receiver
  std::array<uint32_t, kMostPeers> ends;      // of sends, by receiver
  std::array<uint32_t, kMostPeers> receives;  // by sender
};

// The first wait that timed out. In memory of the host.
struct PeerFault {
  int32_t happened = 0;
  int32_t op = -1;
  int32_t place = -1;  // of the member that did not come
};

// A rank's way to the members of a group.
struct PeerGroup {
  int rank = 0;  // its place among them
  int size = 0;
  std::array<PeerBoard*, kMostPeers> boards{};
  PeerFault* fault = nullptr;
  uint64_t limit_ns = 0;
  const bool* waits_on_host = nullptr;  // of the host: this is a first run
};

// What a collective has of the other ranks. Made by the interpreter.
class CudaPeers {
 public:
  // `addresses`: of member 0: inputs, outputs, scratch memory; then of member 1, ...
  CudaPeers(const PeerGroup& group, int32_t op, int inputs, int outputs,
            std::vector<std::byte*> addresses)
      : group_(group),
        op_(op),
        inputs_(inputs),
        operands_(inputs + outputs + 1),
        addresses_(std::move(addresses)) {
    TROUPE_CHECK(addresses_.size() == static_cast<size_t>(group.size * operands_),
                 "addresses of another operation");
  }
  // Of a receive: `message` is where its sender has what it sends. nullptr for other messages.
  CudaPeers(const PeerGroup& group, int32_t op, const std::byte* message)
      : group_(group), op_(op), message_(message) {}

  // Of a staged group: the rank's own operands, as above, or none for a message.
  CudaPeers(NcclGroup& nccl, const PeerGroup& group, const Op& op, int32_t index, int inputs,
            int outputs, std::span<std::byte* const> own)
      : group_(group),
        op_(index),
        inputs_(inputs),
        operands_(inputs + outputs + 1),
        addresses_(static_cast<size_t>(group.size * operands_), nullptr),
        nccl_(&nccl),
        staged_op_(&op) {
    std::copy(own.begin(), own.end(),
              addresses_.begin() + static_cast<std::ptrdiff_t>(group.rank) * operands_);
  }

  int rank() const { return group_.rank; }
  int size() const { return group_.size; }
  bool is_staged() const { return nccl_ != nullptr; }
  const std::byte* message() const { return message_; }

  // Memory of a member, as this GPU sees it; nullptr for an operand that is absent. It belongs to
  // the collective between its first and its last barrier.
  template <class T>
  T* in(int place, int i) const {
    return reinterpret_cast<T*>(at(place, i));
  }
  template <class T>
  T* out(int place, int i) const {
    return reinterpret_cast<T*>(at(place, inputs_ + i));
  }
  std::byte* scratch(int place) const { return at(place, operands_ - 1); }
  // Any of them: inputs first, then outputs.
  std::byte* operand(int place, int number) const { return at(place, number); }

  // Launch the wait until all members have come here. In a staged group it does nothing.
  void barrier(const CudaKernelArguments& args) const;
  // Of staged groups, on all members at once: sends these blocks and receives those; what a member
  // sends to another one is received there in this order. Memory may be used again after it.
  void exchange(const CudaKernelArguments& args, std::span<const PeerBlock> sends,
                std::span<const PeerBlock> receives, std::span<const PeerWhole> wholes = {}) const;

  // Of messages in staged groups: `args` are those of the operation.
  void send_staged(const CudaKernelArguments& args, int to) const;
  void finish_staged(const CudaKernelArguments& args, int to) const;
  void receive_staged(const CudaKernelArguments& args, int from) const;
  // Of messages in others. await_message() and message_fetched() belong together.
  void post_message(const CudaKernelArguments& args, int to) const;
  void await_message(const CudaKernelArguments& args, int from) const;
  void message_fetched(const CudaKernelArguments& args, int from) const;
  void finish_message(const CudaKernelArguments& args, int to) const;

 private:
  // Until `missing` finds no member on this rank's board: it returns a member's place, or -1.
  void wait_on_host(const CudaKernelArguments& args,
                    const std::function<int(const PeerBoard&)>& missing) const;
  std::byte* at(int place, int operand) const {
    return addresses_[static_cast<size_t>(place * operands_ + operand)];
  }

  PeerGroup group_;
  int32_t op_;
  int inputs_ = 0;
  int operands_ = 0;
  std::vector<std::byte*> addresses_;
  const std::byte* message_ = nullptr;
  NcclGroup* nccl_ = nullptr;  // of a staged group
  const Op* staged_op_ = nullptr;
};

// Copies from and to any GPU's memory, gathered into as few launches as possible. Nothing happens
// before the batch is full or launched.
class PeerCopies {
 public:
  explicit PeerCopies(const CudaKernelArguments& args) : args_(args) {}
  void add(const void* from, void* to, int64_t bytes);
  void launch();

  static constexpr int kMost = 64;
  struct Parameters {
    int count = 0;
    std::array<const std::byte*, kMost> from{};
    std::array<std::byte*, kMost> to{};
    std::array<int64_t, kMost> bytes{};
  };

 private:
  const CudaKernelArguments& args_;
  Parameters parameters_;
};

// Sums over ranks, in batches. A sum has a term on each rank, and one or several places for its
// result; these may be places of terms. All sums of a batch have as many terms and results.
class PeerSums {
 public:
  // `accumulate`: the sum is added to what its place holds. `result_dtype`: of the places, if it is
  // not that of the terms: bf16 for f32.
  PeerSums(const CudaKernelArguments& args, DType dtype, int terms, int results,
           bool accumulate = false, std::optional<DType> result_dtype = {});
  // term(k) and result(k): addresses of element 0 of `elements`.
  template <class Term, class Result>
  void add(int64_t elements, const Term& term, const Result& result) {
    if (elements == 0) return;
    if (parameters_.count == room_) launch();
    parameters_.elements[static_cast<size_t>(parameters_.count)] = elements;
    auto* pointer = parameters_.pointers.data() + parameters_.count * (terms_ + results_);
    for (int k = 0; k < terms_; ++k) *pointer++ = term(k);
    for (int k = 0; k < results_; ++k) *pointer++ = result(k);
    ++parameters_.count;
  }
  void launch();

  static constexpr int kMost = 32;
  static constexpr int kMostPointers = kMostMembers + 1;
  struct Parameters {
    int count = 0;
    int terms = 0;
    int results = 0;
    bool accumulate = false;
    std::array<int64_t, kMost> elements{};
    std::array<void*, kMostPointers> pointers{};
  };

 private:
  const CudaKernelArguments& args_;
  DType dtype_;
  DType result_dtype_;
  int terms_;
  int results_;
  int room_;
  Parameters parameters_;
};

}  // namespace troupe
