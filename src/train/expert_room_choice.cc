#include "train/expert_room_choice.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <vector>

#include "options/cluster_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/offload_options.h"
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

// Of a layer and of the stash, times an even load; 0: room for the most that may come, no stash.
struct ExpertMemory {
  double room = 0;
  double stash = 0;
  bool operator==(const ExpertMemory&) const = default;
  bool is_enough() const {
    return (room == 0 || room >= kEnoughRoom) && (stash == 0 || stash > kUsualStash);
  }
};

// Few, so that a run has the same on GPUs that differ by some megabytes.
constexpr std::array kRooms = {32.0, 24.0, 16.0, 12.0, 8.0, 6.0, 4.0,
                               3.0,  2.5,  2.0,  1.75, 1.5, 1.25};
// Over many layers and micro-batches four times an even load does not come, and what comes is
// closer to it than in one layer.
constexpr auto kWithStash = std::to_array<ExpertMemory>({{0, 4},
                                                         {0, 3},
                                                         {0, 2.5},
                                                         {0, 2},
                                                         {32, 2},
                                                         {24, 2},
                                                         {16, 2},
                                                         {12, 2},
                                                         {8, 2},
                                                         {6, 2},
                                                         {4, 2},
                                                         {4, 1.75},
                                                         {4, 1.5},
                                                         {3, 1.5},
                                                         {2.5, 1.5},
                                                         {2, 1.5},
                                                         {2, 1.25},
                                                         {1.75, 1.25},
                                                         {1.5, 1.25},
                                                         {1.5, kUsualStash},
                                                         {1.25, kUsualStash}});

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

Options with_memory(Options options, const ExpertMemory& memory) {
  options.moe_expert_rank_capacity_factor = memory.room;
  options.moe_paged_stash = memory.stash > 0;
  if (memory.stash > 0) options.moe_paged_stash_buffer_size_factor_cuda = memory.stash;
  return options;
}

// What the options leave open, among `ep` ranks; each takes at most as many bytes as the one
// before.
std::vector<ExpertMemory> choices_of(const Options& options, int32_t ep, bool has_stash) {
  std::vector<ExpertMemory> choices;
  const auto add = [&](ExpertMemory choice) {
    if (choice.room >= ep) choice.room = 0;
    choice.room = options.moe_expert_rank_capacity_factor.value_or(choice.room);
    if (has_stash) {
      choice.stash = options.moe_paged_stash_buffer_size_factor_cuda.value_or(choice.stash);
    }
    if (choices.empty() || choices.back() != choice) choices.push_back(choice);
  };
  if (has_stash) {
    std::for_each(kWithStash.begin(), kWithStash.end(), add);
  } else {
    add({});
    for (const double room : kRooms) add({.room = room});
  }
  return choices;
}

// Whether the step of the rank and its evaluation take no more than `bytes`.
bool fits(const Options& options, const ModelConfig& config, int32_t rank, uint64_t bytes) {
  const uint64_t step = step_bytes_with_room(options, config, rank,
                                             options.moe_expert_rank_capacity_factor.value_or(0));
  return step <= bytes && step + evaluation_bytes(options, config, rank) <= bytes;
}

// The first of the choices that fits every rank; nothing where none does.
template <class Fits>
std::optional<ExpertMemory> first_that_fits(const std::vector<ExpertMemory>& choices,
                                            const std::vector<int32_t>& ranks, const Fits& fits) {
  auto chosen = choices.begin();
  // Each class of ranks can only lower it.
  for (const int32_t rank : ranks) {
    if (fits(rank, *chosen)) continue;
    chosen = std::partition_point(chosen + 1, choices.end(),
                                  [&](const ExpertMemory& choice) { return !fits(rank, choice); });
    if (chosen == choices.end()) return std::nullopt;
  }
  return *chosen;
}

// What the options leave open; nothing where ranks share no experts.
std::optional<ExpertMemory> choose_memory(const Options& options, const ModelConfig& config,
                                          uint64_t usable) {
  const auto run = std::make_shared<const RunLayout>(run_layout_of(options, config));
  const int32_t ep = run->layout.ep();
  if (config.num_experts == 0 || ep == 1) return std::nullopt;
  const std::vector<int32_t> ranks = classify_ranks(config, options.compute_dtype, run).first_rank;
  const auto first_of = [&](const std::vector<ExpertMemory>& choices) {
    return first_that_fits(choices, ranks, [&](int32_t rank, const ExpertMemory& choice) {
      return fits(with_memory(options, choice), config, rank,
                  usable / static_cast<uint64_t>(options.ranks_per_gpu));
    });
  };
  const std::vector<ExpertMemory> choices =
      choices_of(options, ep, options.moe_paged_stash.value_or(false));
  const std::optional<ExpertMemory> chosen = first_of(choices);
  if (!options.moe_paged_stash && !(chosen && chosen->is_enough())) {
    const auto stashed = first_of(choices_of(options, ep, /*has_stash=*/true));
    if (stashed && (!chosen || stashed->is_enough())) return stashed;
  }
  return chosen.value_or(choices.back());
}

// Of the room or of the stash that the options ask for.
bool leaves_memory_open(const Options& options) {
  return !options.moe_expert_rank_capacity_factor ||
         (options.moe_paged_stash.value_or(false) &&
          !options.moe_paged_stash_buffer_size_factor_cuda);
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
  if (usable == 0 || !leaves_memory_open(options)) return options;
  const std::optional<ExpertMemory> chosen = choose_memory(options, config, usable);
  if (!chosen) return options;
  if (chosen->room > 0) options.moe_expert_rank_capacity_factor = chosen->room;
  if (chosen->stash > 0) {
    options.moe_paged_stash = true;
    options.moe_paged_stash_buffer_size_factor_cuda = chosen->stash;
  }
  return options;
}

std::string note_on_stash(const Options& asked, const Options& chosen) {
  if (asked.moe_paged_stash || !chosen.moe_paged_stash) return "";
  const double room = chosen.moe_expert_rank_capacity_factor.value_or(0);
  return fmt::format(
      "Note: --moe-paged-stash is on, as the GPU has no room for {} times an even load of experts "
      "without it. With it a layer has room for {}, and the whole step for {} times. In measured "
      "steps its copies took 3.6 to 5.3 % of the time; --moe-paged-stash=false does without "
      "(docs/memory.md).",
      kEnoughRoom, room > 0 ? fmt::format("{} times", room) : "the most that may come",
      *chosen.moe_paged_stash_buffer_size_factor_cuda);
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
