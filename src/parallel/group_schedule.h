// The check of collective_schedule.h where every rank has only its own program at hand: as threads,
// as processes, on several hosts.
#pragma once

#include <cstdint>

#include "comm/process_group.h"
#include "parallel/layout.h"
#include "program/program.h"

namespace troupe {

// verify_collectives() of the programs of all ranks of the group, which has the layout's ranks. All
// must call it, each with its own program, outside of programs. Ranks whose programs look the same
// to others are told by a hash; rank 0 gets one of each, and checks. Returns when that is done, on
// all ranks; a fault is a UserError (does_not_fit) on rank 0, of which the others are told.
void verify_collectives(ProcessGroup& group, int32_t rank, const Program& program,
                        const Layout& layout);

}  // namespace troupe
