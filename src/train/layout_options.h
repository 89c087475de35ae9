// From options to the parallel layout: the meshes, the stages of the pipeline, its schedule.
//
// Pure functions; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/device.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "parallel/process_group.h"
#include "train/options.h"

namespace troupe {

// The layout of one training step of this model, checked against the model, the sequences and the
// batch: the global batch size must be a multiple of the micro-batch size times DP. `group`: of
// ranks that are processes; null where all are on one machine.
RunLayout run_layout_of(const Options& options, const ModelConfig& config,
                        const ProcessGroup* group = nullptr);

// Which kinds of groups have GPUs that do not reach each other's memory, by --gpu-exchange and by
// where the ranks are: with "auto" those of which some group lies on several machines, with "nccl"
// all of more than one rank. A bad request where that cannot be.
std::array<bool, kRankGroupCount> staged_groups_of(const Layout& layout,
                                                   const std::string& exchange,
                                                   const std::vector<int32_t>& machine_of_rank,
                                                   int32_t ranks_per_gpu);

// The threads of each rank of `group` (null: of a run of one rank). --threads are those of a
// machine and divided among its ranks, as are its cores without --threads. Processes that a
// launcher has bound to cores of their own keep these.
int threads_of_rank(const Options& options, const ProcessGroup* group);

// Among how many ranks what one process of the run may use is divided: its thread_count() threads,
// or on Device::cuda a GPU. `group`: null where all ranks are this process's.
int ranks_that_share(const Options& options, const ProcessGroup* group, Device device);

// The GPU of a rank among those that this process sees: each rank of a machine has the next one, or
// `ranks_per_gpu` of them share each. A bad request when there are too few, or none can be used.
// `group`: null for a run of one rank.
//
// A launcher may let each process see only some of a machine's GPUs (CUDA_VISIBLE_DEVICES). Where a
// process sees too few for all ranks, its rank takes one of those, and require_own_gpu() tells.
int gpu_of_rank(const ProcessGroup* group, int32_t rank, int32_t ranks_per_gpu);

// The same by numbers: the rank at `place` among `ranks` of a machine, in a process that sees
// `gpus`. Nothing when these are too few.
std::optional<int> gpu_of_place(int32_t place, int32_t ranks, int32_t gpus, int32_t ranks_per_gpu,
                                bool is_process);

// Refuses (bad request) ranks of a machine more of which have got the same GPU than may share one.
// All ranks must ask, each with what tells its GPU apart (gpu_identity()).
void require_own_gpu(ProcessGroup& group, int32_t rank, uint64_t gpu, int32_t ranks_per_gpu);

// Refuses every layout but that of one rank: for commands that work with one.
void check_runnable_layout(const Options& options);

}  // namespace troupe
