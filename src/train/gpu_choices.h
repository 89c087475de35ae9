// What a run leaves open that depends on its GPUs, chosen in one order: first which products are in
// 8 bits (fp8_module_choice.h), then the experts' room and stash (expert_room_choice.h).
//
// Pure functions of the options, the model and a number of bytes, so that all ranks choose alike.
// Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// `usable`: as with_expert_room() takes it.
Options with_gpu_choices(const Options& options, const ModelConfig& config, uint64_t usable);

// A line for each choice that costs something.
std::vector<std::string> notes_on_gpu_choices(const Options& asked, const Options& chosen);

}  // namespace troupe
