// The communicators of one rank of a layout, one for each group that it shares with others.
#pragma once

#include "comm/process_group.h"
#include "parallel/layout.h"

namespace troupe {

// They belong to `group`, which has the layout's ranks. Null for groups of this rank alone. Any
// thread.
Communicators communicators_of(ProcessGroup& group, const Layout& layout, int32_t rank);
// The same; none at all for null, a run of one rank.
Communicators communicators_of(ProcessGroup* group, const Layout& layout, int32_t rank);

}  // namespace troupe
