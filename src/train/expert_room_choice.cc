#include "train/expert_room_choice.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
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
  const uint64_t of_rank = usable / static_cast<uint64_t>(options.ranks_per_gpu);
  const auto fits = [&](int32_t rank, double room) {
    const uint64_t step = step_bytes_with_room(options, config, rank, room);
    if (step > of_rank) return false;
    Options tried = options;
    tried.moe_expert_rank_capacity_factor = room;
    return step + evaluation_bytes(tried, config, rank) <= of_rank;
  };
  auto chosen = rooms.begin();
  // Less room never takes more bytes, so each class can only lower it.
  for (const int32_t rank : classify_ranks(config, options.compute_dtype, run).first_rank) {
    if (fits(rank, *chosen)) continue;
    chosen = std::partition_point(std::min(chosen + 1, rooms.end() - 1), rooms.end() - 1,
                                  [&](double room) { return !fits(rank, room); });
  }
  return *chosen;
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
  if (usable == 0 || options.moe_expert_rank_capacity_factor) return options;
  const double room = choose_expert_room(options, config, usable);
  if (room > 0) options.moe_expert_rank_capacity_factor = room;
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
