// What commands that run on several ranks do alike: how the ranks come to be and start together,
// and what they check before anything is allocated.
//
// `group` is the ranks' group everywhere, null for a run of one rank. Functions that take a group
// are called by all ranks at once, each with its own number. Errors are UserErrors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/device.h"
#include "base/thread_pool.h"
#include "options/device_options.h"
#include "options/options.h"
#include "parallel/process_group.h"
#include "parallel/thread_group.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "runtime/interpreter.h"
#include "train/step_profile.h"

namespace troupe {

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

// Refuses ranks that were not started with the options of rank 0, and names the options.
void require_same_options(const Options& options, ProcessGroup& group, int32_t rank);

// Refuses (does_not_fit) what the machine has no memory for, or with Device::cuda the GPU: `bytes`
// of this rank with those of the ranks that share it. The one that needs most of these speaks, with
// its `breakdown`. `gpu`: see gpu_of_rank(); a GPU that more ranks have got than may share one is a
// bad request.
void require_memory(const Options& options, ProcessGroup* group, int32_t rank, uint64_t bytes,
                    int gpu, const std::string& breakdown);

// The same for what the ranks of a machine need of the host's memory, beside that of their GPUs.
void require_host_memory(const Options& options, ProcessGroup* group, int32_t rank,
                         const MemoryPlan& plan);

// What a rank can do at best: its share of the machine, or of its GPU, measured by rank 0 while the
// others wait.
ProfileLimits measure_limits_of_rank(const DeviceSpec& spec, ProcessGroup* group, int32_t rank,
                                     DType compute_dtype);

// Runs the program on all ranks and adds what was seen to `profile`, with a beginning that all
// ranks of a machine measure by the same clock; machines begin when all ranks have met.
void add_profiled_run(Interpreter& interpreter, ProcessGroup* group, int32_t rank,
                      StepProfile& profile);

// What `text` is on the ranks among `chosen`, in their order; only on rank 0.
std::vector<std::string> gather_from(ProcessGroup* group, int32_t rank,
                                     const std::vector<int32_t>& chosen, const std::string& text);

struct WrittenTimelines {
  std::string note;   // where they are
  std::string fault;  // which file could not be written, and why; empty: all were
};

// Each rank among `chosen` writes the last run of its profile as
// --profile-dir/rank<R>_step<N>.json; if they are several, rank 0 writes a timeline of them all
// besides, ranks_step<N>.json. Both texts are only on rank 0, which hears of all ranks' faults.
WrittenTimelines write_timelines(const Options& options, ProcessGroup* group, int32_t rank,
                                 int64_t step, const std::vector<int32_t>& chosen,
                                 const StepProfile& profile);

// Returns when all ranks have come.
void barrier(ProcessGroup* group, int32_t rank);

}  // namespace troupe
