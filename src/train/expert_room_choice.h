// The room for experts that a training run has without --moe-expert-rank-capacity-factor ("auto",
// docs/memory.md "Room for experts"), and the stash that it has without --moe-paged-stash or its
// factor: the largest with which the step of every rank fits its GPU.
//
// A pure function of the options, the model and a number of bytes, so that all ranks choose alike.
// It takes Options, which it resolves with one room after the other.
// It plans the step of one rank of each class, some of them several times, with few micro-batches
// (train/short_step.h). Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "model/model_config.h"
#include "options/options.h"
#include "plan/expert_load.h"

namespace troupe {

// What the training step of a rank takes with so much room, as --moe-expert-rank-capacity-factor
// says it; without evaluation and without the step's fallback. Planned with few micro-batches.
uint64_t step_bytes_with_room(Options options, const ModelConfig& config, int32_t rank,
                              double room);

// Times an even load; enough for routers that are balanced by a loss or a bias.
inline constexpr double kEnoughRoom = 1.5;

// The options with the choice made where they leave it open and ranks share experts; otherwise as
// they are. Without a stash: the largest room with which the step of every rank and its evaluation
// fit the GPU; unset where that is the most that may come, and the least (1.25) where nothing fits.
// With a stash: room and stash together, or the one of them that is open.
// With neither room nor stash given, the stash is taken where without it less than kEnoughRoom fits
// and with it that does and a factor above kUsualStash, or where nothing fits without it and
// something does with it.
// `usable`: bytes of a GPU, which --ranks-per-gpu ranks share; 0 (the run is on CPUs, or the GPU is
// not known) leaves all open. UserError where the options allow no layout.
Options with_expert_room(Options options, const ModelConfig& config, uint64_t usable);

// Says so where such a choice takes the stash; otherwise empty.
std::string note_on_stash(const Options& asked, const Options& chosen);

// The same with the least room that the choice can give and that suffices for the load.
Options with_least_expert_room(Options options, const ModelConfig& config, const ExpertLoad& load);

// What a run with --device cuda may take of a GPU of --gpus, or of this machine's first one: all
// but 1/32, which is for CUDA and its libraries. 0 where there is none.
uint64_t usable_bytes_of_gpu(const Options& options);

}  // namespace troupe
