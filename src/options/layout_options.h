// From options to the parallel layout: the meshes, the stages of the pipeline, its schedule.
//
// Pure functions; any thread. Errors are UserErrors (bad request) that name the flag.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "options/options.h"

namespace troupe {

// The layout of one training step of this model, checked against the model, the sequences and the
// batch: the global batch size must be a multiple of the micro-batch size times DP. `group`: of
// ranks that are processes; null where all are on one machine.
RunLayout run_layout_of(const Options& options, const ModelConfig& config,
                        const ProcessGroup* group = nullptr);

// Which kinds of groups have GPUs that do not reach each other's memory, by --gpu-exchange and by
// where the ranks are: with automatic those of which some group lies on several machines, with nccl
// all of more than one rank. A bad request where that cannot be.
std::array<bool, kRankGroupCount> staged_groups_of(const Layout& layout, GpuExchange exchange,
                                                   const std::vector<int32_t>& machine_of_rank,
                                                   int32_t ranks_per_gpu);

// Refuses every layout but that of one rank: for commands that work with one.
void check_runnable_layout(const Options& options);

}  // namespace troupe
