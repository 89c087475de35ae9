// Communicator: how the kernel of a collective operation reaches the other ranks of its group.
//
// The interface is what operations know; src/parallel implements it. A communicator belongs to one
// rank and is called by that rank's thread alone. Every member of the group makes the same calls in
// the same order; a call returns when this rank's part is done and no other rank reads or writes
// its tensors any more. Messages between two members (send, receive) are an exception: only these
// two take part, and a send does not wait for its receiver.
//
// Order of sums: ascending rank, element by element, in the accumulation dtype, rounded once. So
// every rank gets the same bits, whatever the timing.
//
// Unlike all other work of kernels, a call may throw: UserError (failed) when a rank is missing for
// too long, has ended, or calls something else. All ranks of the group then throw.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

#include "program/kernel.h"
#include "program/rank_group.h"

namespace troupe {

// The operation that calls, for messages.
struct CollectiveCall {
  const Op* op = nullptr;
  int32_t index = -1;  // in its program
};

// Bytes for one member of the group, or from it.
struct Block {
  void* data = nullptr;
  int64_t bytes = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  // This rank's place among the members, and their number.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The rank of a member among all ranks of the run.
  virtual int32_t rank_at(int place) const = 0;
  // How long a call waits for a member.
  virtual std::chrono::milliseconds limit() const = 0;

  // Replaces every tensor by its sum over the ranks. f64, f32 or i32; not ragged.
  virtual void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                          ThreadPool& pool) = 0;

  // In place, of every tensor the shard with this rank's place (program/shard.h): it becomes the
  // sum over the ranks; the other elements stay. Types as for all_reduce. The first tensors have
  // these owners (-1: none).
  virtual void reduce_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                             std::span<const int16_t> owners, ThreadPool& pool) = 0;

  // In place: the shard with place r of every tensor becomes what rank r has there. Any dtype.
  virtual void gather_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                             std::span<const int16_t> owners, ThreadPool& pool) = 0;

  // `result` = the sum of `own` over the ranks; of the same type. Both may be the same memory.
  // Floating-point or i32.
  virtual void sum(const CollectiveCall& call, const TensorView& own, const TensorView& result,
                   ThreadPool& pool) = 0;

  // `result` = this rank's part of the sum of `own` over the ranks: the first dimension of `own` is
  // size() times that of `result`. They share no memory.
  virtual void reduce_scatter(const CollectiveCall& call, const TensorView& own,
                              const TensorView& result, ThreadPool& pool) = 0;

  // `gathered` = the tensors of ranks 0, 1, ..., one after the other. Any dtype.
  virtual void all_gather(const CollectiveCall& call, const TensorView& own,
                          const TensorView& gathered, ThreadPool& pool) = 0;

  // What rank r has in `sent[q]` comes to rank q's `received[r]`; both have as many bytes. Sent and
  // received memory is disjoint.
  virtual void all_to_all(const CollectiveCall& call, std::span<const Block> sent,
                          std::span<const Block> received, ThreadPool& pool) = 0;

  // Opens memory of this rank to all members, who do the same, each with as many windows of the
  // same sizes. A window is cut into size() sections of one length, one for each member in order:
  // until close() a member may put bytes into its own section of every window, each once, and all
  // from the section's beginning on. After close() this rank's windows hold what was put there, and
  // no rank writes into them any more. The windows' list stays until then.
  virtual void open(const CollectiveCall& call, std::span<const Block> windows) = 0;
  // `offset` is one within the section. Any thread of this rank's pool; the bytes stay as they are
  // until close().
  virtual void put(int member, size_t window, int64_t offset, Block bytes) = 0;
  virtual void close() = 0;

  // `running` = the sum of `own` over ranks 0 to this one, `total` = over all ranks. All i32, of as
  // many elements; `own` shares no memory with the others.
  virtual void prefix_sum(const CollectiveCall& call, const TensorView& own,
                          const TensorView& running, const TensorView& total) = 0;

  // Messages from one member to another arrive in the order in which they are sent. A tensor that
  // was sent must stay as it is until finish_send() for it has returned, which waits for the
  // receiver; sends to one member are finished in their order.
  virtual void send(const CollectiveCall& call, const TensorView& tensor, int to) = 0;
  virtual void finish_send(const CollectiveCall& call, int to) = 0;
  virtual void receive(const CollectiveCall& call, const TensorView& tensor, int from) = 0;
};

// The communicators of one rank, by RankGroup. Null where the rank's programs have no collectives.
struct Communicators {
  std::array<Communicator*, kRankGroupCount> members{};

  Communicator* of(RankGroup group) const { return members[static_cast<size_t>(group)]; }
  Communicator*& of(RankGroup group) { return members[static_cast<size_t>(group)]; }
};

}  // namespace troupe
