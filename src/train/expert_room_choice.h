// The room for experts that a training run has without --moe-expert-rank-capacity-factor ("auto",
// docs/memory.md "Room for experts"): the largest with which the step of every rank fits its GPU.
//
// A pure function of the options, the model and a number of bytes, so that all ranks choose alike.
// It takes Options, which it resolves with one room after the other.
// It plans the step of one rank of each class, some of them several times, with few micro-batches
// (train/short_step.h). Any thread.
#pragma once

#include <cstdint>

#include "model/model_config.h"
#include "options/options.h"
#include "plan/expert_load.h"

namespace troupe {

// What the training step of a rank takes with so much room, as --moe-expert-rank-capacity-factor
// says it; without evaluation and without the step's fallback. Planned with few micro-batches.
uint64_t step_bytes_with_room(Options options, const ModelConfig& config, int32_t rank,
                              double room);

// Times an even load; 0: room for the most rows that may come, which fits. Where not even the least
// room (1.25) fits, it is that. `usable`: bytes of a GPU, which --ranks-per-gpu ranks share. What
// evaluation needs beside the step is counted. UserError where the options allow no layout.
double choose_expert_room(const Options& options, const ModelConfig& config, uint64_t usable);

// The options with the choice made where they leave it open and ranks share experts, and then, with
// a stash of which no factor is given, the largest one that fits, of at most 4; otherwise as they
// are. `usable` 0 (the run is on CPUs, or the GPU is not known) leaves it open, too.
Options with_expert_room(Options options, const ModelConfig& config, uint64_t usable);

// The same with the least room that the choice can give and that suffices for the load.
Options with_least_expert_room(Options options, const ModelConfig& config, const ExpertLoad& load);

// What a run with --device cuda may take of a GPU of --gpus, or of this machine's first one: all
// but 1/32, which is for CUDA and its libraries. 0 where there is none.
uint64_t usable_bytes_of_gpu(const Options& options);

}  // namespace troupe
