// The collectives and messages of all ranks' programs, and the check that they fit together: a
// schedule in which ranks would wait for each other for ever does not start.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/layout.h"
#include "program/program.h"

namespace troupe {

// programs[r] is that of rank r of the layout. Checks that
// - the members of every group run the same collectives in the same order: kinds, dtypes, shapes;
// - the messages from one rank to another are received in the order of sending, with the same dtype
//   and shape, and each send is finished;
// - the programs come to their end when every collective waits for all its members, a receive for
//   its send, and the end of a send for its receive.
// The first fault is a UserError (does_not_fit: the plan is refused) that names the operations of
// both ranks, or of all that would wait for ever. The work grows with the number of operations.
void verify_collectives(std::span<const Program* const> programs, const Layout& layout);

// Of the kinds, groups, peers, dtypes and shapes of all collectives and messages. Ranks at the same
// place of the pipeline have equal ones when verify_collectives() finds that their programs agree,
// and otherwise practically never.
uint64_t hash_collectives(const Program& program);

}  // namespace troupe
