// The collectives and messages of all ranks' programs, and the check that they fit together: a
// schedule in which ranks would wait for each other forever (a deadlock) does not start.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/layout.h"
#include "program/op_spec.h"
#include "program/program.h"

namespace troupe {

// All that other ranks see of a program: its collectives and messages, in their order. Groups are
// kinds, not ranks, so that ranks may share one trace; the program itself need not be kept.
struct CollectiveTrace {
  struct Tensor {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;
    bool given = false;                           // an optional operand may not be
    bool operator==(const Tensor& other) const {  // whatever the names
      return given == other.given && dtype == other.dtype && shape == other.shape;
    }
  };
  struct Event {
    int32_t index = 0;  // of the operation
    const OpSpec* spec = nullptr;
    Place place;
    RankGroup group = RankGroup::world;
    std::optional<MessageUse> message;  // none: a collective
    ValueId first;                      // of the tensors, in the program
    std::vector<Tensor> tensors;        // handed over, or got
  };
  std::vector<Event> events;
};

CollectiveTrace trace_collectives(const Program& program);

// programs[r] is that of rank r of the layout. Checks that
// - the members of every group run the same collectives in the same order: kinds, dtypes, shapes;
// - the messages from one rank to another are received in the order of sending, with the same dtype
//   and shape, and each send is finished;
// - the programs come to their end when every collective waits for all its members, a receive for
//   its send, and the end of a send for its receive.
// The first fault is a UserError (does_not_fit: the plan is refused) that names the operations of
// both ranks, or of all that would wait forever. The work grows with the number of operations.
void verify_collectives(std::span<const Program* const> programs, const Layout& layout);

// The same where ranks share programs: traces[trace_of_rank[r]] is that of rank r. Traces that meet
// in several groups are compared once for each kind of group; all ranks are carried out.
void verify_collectives(std::span<const CollectiveTrace> traces,
                        std::span<const int32_t> trace_of_rank, const Layout& layout);

// Of the kinds, groups, peers, dtypes and shapes of all collectives and messages, and of which
// message each end of a send is. Programs with equal ones look the same to other ranks; those of
// ranks at the same place of the pipeline are equal when verify_collectives() finds that they
// agree.
uint64_t hash_collectives(const Program& program);

}  // namespace troupe
