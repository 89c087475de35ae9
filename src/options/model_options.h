// From options to what the builders need: the model's shape, the size of a step.
// Every command resolves them here, so that `plan` and `inspect` speak of what `train` will run.
//
// Reads configuration files; otherwise pure functions. Any thread. Errors are UserErrors (bad
// request) that name the flag or the file.
#pragma once

#include "model/model_config.h"
#include "options/options.h"
#include "passes/step_programs.h"

namespace troupe {

// The shape that --model names or flags describe, changed by the flags that were given, and
// validated.
//
// --model is, in this order: a config.json, a folder that holds one, or the name of a file in the
// folder of shipped configurations without ".json". That folder is ../share/troupe/configs from the
// executable's folder; in a folder of a build it is a link to the sources'.
//
// Without --model the flags describe the model alone (options/flag_model.h).
//
// Changing --num-layers keeps which layers have experts as long as that is clear; --num-experts
// makes a dense model one of MoE layers, or the reverse.
//
// `base`, where set, is the model that flags change when --model is not given.
ModelConfig load_model_config(const Options& options, const ModelConfig* base = nullptr);

// The config.json that --model means; empty when flags alone describe the model.
std::string config_path_of(const Options& options);

// Tokens per sequence: --seq-length, or all positions of the model. Refuses more than those.
int32_t sequence_length_of(const Options& options, const ModelConfig& config);

// --cp-comm-type.
ContextExchange context_exchange_of(const Options& options);

// One training step of a rank: micro-batches (the largest global batch size of the run over
// --micro-batch-size and the data-parallel size), sequence, clipping, Adam's constants.
TrainingStepOptions training_step_options(const Options& options, const ModelConfig& config);

}  // namespace troupe
