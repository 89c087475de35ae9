// How the ranks of a run come to be, start together, and end. What each is, is a RankSession.
//
// Errors are UserErrors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <type_traits>

#include "comm/process_group.h"
#include "comm/thread_group.h"
#include "options/device_options.h"
#include "options/options.h"

namespace troupe {

// Whether this process has rank 0, which alone speaks. `processes`: null where it is alone.
bool leads(const ProcessGroup* processes);

// A run of spec.ranks ranks: `processes` if a launcher has started them (all must call it), or
// threads of this one. make(rank, group) gives a pointer to what a rank works with and is called
// for the ranks of this process one after the other; then body(*pointer) runs for all ranks at
// once. What any of them throws ends all, and is thrown here.
template <class Make, class Body>
void run_all_ranks(const DeviceSpec& spec, ProcessGroup* processes, const Make& make,
                   const Body& body) {
  std::optional<ThreadGroup> threads;
  if (processes == nullptr && spec.ranks > 1) {
    threads.emplace(spec.ranks, spec.collective_timeout);
  }
  ProcessGroup* const group = threads ? &*threads : processes;
  using Rank = std::invoke_result_t<Make, int32_t, ProcessGroup*>;
  if (group == nullptr) {
    const Rank only = make(0, nullptr);
    body(*only);
    return;
  }
  std::map<int32_t, Rank> ranks;
  for (const int32_t rank : group->own_ranks()) ranks.emplace(rank, make(rank, group));
  run_ranks(*group, [&](int rank) { body(*ranks.at(rank)); });
}

// Refuses ranks that were not started with the options of rank 0, and names the options. All ranks
// call it at once.
void require_same_options(const Options& options, ProcessGroup& group, int32_t rank);

}  // namespace troupe
