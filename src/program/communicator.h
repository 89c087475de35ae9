// Communicator: how the kernel of a collective operation reaches the other ranks of its group.
//
// The interface is what operations know; src/parallel implements it. A communicator belongs to one
// rank and is called by that rank's thread alone. Every member of the group makes the same calls in
// the same order; a call returns when this rank's part is done and no other rank reads or writes
// its tensors any more.
//
// Order of sums: ascending rank, element by element. So every rank gets the same bits, whatever the
// timing.
//
// Unlike all other work of kernels, a call may throw: UserError (failed) when a rank is missing for
// too long, has ended, or calls something else. All ranks of the group then throw.
#pragma once

#include <span>

#include "program/kernel.h"

namespace troupe {

// The ranks that a collective joins, named by what they have in common; which ranks these are is
// the layout's matter.
enum class RankGroup : uint8_t { data_parallel };
std::string_view name_of(RankGroup group);

// The operation that calls, for messages.
struct CollectiveCall {
  const Op* op = nullptr;
  int32_t index = -1;  // in its program
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  // Replaces every tensor by its sum over the ranks. f64, f32 or i32; not ragged.
  virtual void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                          ThreadPool& pool) = 0;

  // `running` = the sum of `own` over ranks 0 to this one, `total` = over all ranks. All i32, of as
  // many elements; `own` shares no memory with the others.
  virtual void prefix_sum(const CollectiveCall& call, const TensorView& own,
                          const TensorView& running, const TensorView& total) = 0;
};

// The communicators of one rank, by RankGroup. Null where the rank's programs have no collectives.
struct Communicators {
  Communicator* data_parallel = nullptr;

  Communicator* of(RankGroup group) const {
    TROUPE_CHECK(group == RankGroup::data_parallel, "a group without a communicator");
    return data_parallel;
  }
};

}  // namespace troupe
