#include "train/expert_room_choice.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "options/cluster_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/inference_programs.h"
#include "passes/step_programs.h"
#include "plan/rank_plans.h"
#include "runtime/device_memory.h"
#include "train/planned_program.h"
#include "train/short_step.h"

namespace troupe {
namespace {

// Of a GPU's bytes, for its context, libraries and NCCL: 2.5 GiB of 80.
constexpr uint64_t kReserve = 32;

// Few, so that a run has the same on GPUs that differ by some megabytes.
constexpr std::array kRooms = {32.0, 24.0, 16.0, 12.0, 8.0, 6.0, 4.0,
                               3.0,  2.5,  2.0,  1.75, 1.5, 1.25};
// Of the stash. Over many layers and micro-batches four times an even load does not come.
constexpr std::array kStashes = {4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25};

// Beside the step, on the same state.
uint64_t evaluation_bytes(const Options& options, const ModelConfig& config, int32_t rank) {
  if (options.eval_iters == 0) return 0;
  const StepSpec spec = step_spec_of(options, config);
  const TrainingStepOptions& step = spec.options;
  const int32_t samples = options.eval_micro_batch_size.value_or(step.micro_batch_size);
  const InferenceStep evaluation =
      build_evaluation_step(config, spec.state_of(rank), samples, step.sequence,
                            step.loss_chunk_tokens, step.reset_attention_mask, step.precision);
  return plan_program(*evaluation.program, options).own_bytes();
}

// Whether the step of the rank and its evaluation take no more than `bytes`.
bool fits(const Options& options, const ModelConfig& config, int32_t rank, double room,
          uint64_t bytes) {
  const uint64_t step = step_bytes_with_room(options, config, rank, room);
  if (step > bytes) return false;
  Options tried = options;
  tried.moe_expert_rank_capacity_factor = room;
  return step + evaluation_bytes(tried, config, rank) <= bytes;
}

// The first of the choices, of which each takes at most as many bytes as the one before, that
// fits(rank, choice) every rank; else the last one.
template <class Fits>
double first_that_fits(std::span<const double> choices, std::span<const int32_t> ranks,
                       const Fits& fits) {
  auto chosen = choices.begin();
  // Each class of ranks can only lower it.
  for (const int32_t rank : ranks) {
    if (fits(rank, *chosen)) continue;
    chosen = std::partition_point(std::min(chosen + 1, choices.end() - 1), choices.end() - 1,
                                  [&](double choice) { return !fits(rank, choice); });
  }
  return *chosen;
}

// Nothing where not even the least of kStashes fits.
std::optional<double> choose_stash(const Options& options, const ModelConfig& config,
                                   uint64_t usable) {
  const auto run = std::make_shared<const RunLayout>(run_layout_of(options, config));
  if (config.num_experts == 0 || run->layout.ep() == 1) return std::nullopt;
  const auto fits_with = [&](int32_t rank, double factor) {
    Options tried = options;
    if (factor > 0) tried.moe_paged_stash_buffer_size_factor_cuda = factor;
    return fits(tried, config, rank, options.moe_expert_rank_capacity_factor.value_or(0),
                usable / static_cast<uint64_t>(options.ranks_per_gpu));
  };
  std::vector<double> choices(kStashes.begin(), kStashes.end());
  choices.push_back(0);  // as where no factor is given
  const double chosen = first_that_fits(
      choices, classify_ranks(config, options.compute_dtype, run).first_rank, fits_with);
  return chosen > 0 ? std::optional(chosen) : std::nullopt;
}

}  // namespace

uint64_t step_bytes_with_room(Options options, const ModelConfig& config, int32_t rank,
                              double room) {
  options.moe_expert_rank_capacity_factor = room;
  options = with_few_micro_batches(options, training_step_options(options, config).micro_batches,
                                   kFullRounds);
  const StepSpec spec = step_spec_of(options, config);
  const TrainingStep step = build_training_step(config, spec.state_of(rank), spec.options);
  return plan_program(*step.program, options).total_bytes();
}

double choose_expert_room(const Options& options, const ModelConfig& config, uint64_t usable) {
  const auto run = std::make_shared<const RunLayout>(run_layout_of(options, config));
  const int32_t ep = run->layout.ep();
  if (config.num_experts == 0 || ep == 1) return 0;
  std::vector<double> rooms = {0};
  std::copy_if(kRooms.begin(), kRooms.end(), std::back_inserter(rooms),
               [&](double room) { return room < ep; });
  return first_that_fits(rooms, classify_ranks(config, options.compute_dtype, run).first_rank,
                         [&](int32_t rank, double room) {
                           return fits(options, config, rank, room,
                                       usable / static_cast<uint64_t>(options.ranks_per_gpu));
                         });
}

Options with_least_expert_room(Options options, const ModelConfig& config, const ExpertLoad& load) {
  const bool is_open = !options.moe_expert_rank_capacity_factor && config.num_experts > 0;
  const int32_t ep = options.expert_model_parallel_size;
  // What does not divide into ranks is refused elsewhere.
  if (!is_open || config.num_experts % ep != 0) return options;
  const double needed = load.largest(ep);
  const auto least =
      std::find_if(kRooms.rbegin(), kRooms.rend(), [&](double room) { return room >= needed; });
  if (least != kRooms.rend() && ep > *least) {
    options.moe_expert_rank_capacity_factor = *least;
  }
  return options;
}

Options with_expert_room(Options options, const ModelConfig& config, uint64_t usable) {
  if (usable == 0) return options;
  if (!options.moe_expert_rank_capacity_factor) {
    const double room = choose_expert_room(options, config, usable);
    if (room > 0) options.moe_expert_rank_capacity_factor = room;
  }
  if (options.moe_paged_stash && !options.moe_paged_stash_buffer_size_factor_cuda) {
    options.moe_paged_stash_buffer_size_factor_cuda = choose_stash(options, config, usable);
  }
  return options;
}

uint64_t usable_bytes_of_gpu(const Options& options) {
  if (options.device != Device::cuda) return 0;
  uint64_t bytes = 0;
  if (const std::optional<GpuCluster> cluster = gpu_cluster_of(options)) {
    bytes = cluster->model.memory_bytes;
  } else if (why_no_gpu().empty()) {
    bytes = total_device_bytes();
  }
  return bytes - bytes / kReserve;
}

}  // namespace troupe
