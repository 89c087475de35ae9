// Which modules have their products in 8 bits where --fp8-modules leaves it open ("auto",
// docs/low_precision.md "Where it gains"): those whose products, with the quantisation of what they
// read, take less time by the plan than as they were.
//
// A pure function of the options, the model and a GPU's figures, so that all ranks choose alike. It
// takes Options, which it resolves with the choice open. It plans the step of two ranks of the
// pipeline, with few micro-batches (train/short_step.h). Any thread.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "model/model_config.h"
#include "options/options.h"
#include "plan/gpu_cluster.h"
#include "program/module.h"

namespace troupe {

// Seconds of a step, of the ranks that are planned, by the group of products.
struct ProductTimes {
  std::array<double, kProductGroupCount> plain{};
  std::array<double, kProductGroupCount> in_8_bits{};  // with quantisation
};
ProductTimes time_products(const Options& options, const ModelConfig& config, const GpuModel& gpu);

// The options with the choice made where they leave it open; otherwise as they are. Without figures
// of a GPU it stays open.
Options with_fp8_modules(Options options, const ModelConfig& config,
                         const std::optional<GpuModel>& gpu);

// What a run has with --device cuda: --gpus, --hardware, or what is shipped for the first GPU here.
std::optional<GpuModel> figures_of_gpu(const Options& options);

// Says so where such a choice keeps some products as they were; otherwise empty.
std::string note_on_fp8_modules(const Options& asked, const Options& chosen);

}  // namespace troupe
