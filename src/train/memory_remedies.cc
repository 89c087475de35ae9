#include "train/memory_remedies.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "options/check_options.h"
#include "options/cluster_options.h"
#include "options/device_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "plan/fallback_step.h"
#include "plan/step_time.h"
#include "train/expert_room_choice.h"
#include "train/planned_program.h"
#include "train/terminal.h"

namespace troupe {
namespace {

constexpr int32_t kMostRanks = 1024;
// Each plans a whole step, and the other ranks wait meanwhile.
constexpr int32_t kRankCountsTried = 4;
constexpr double kLeastSaving = 0.05;
constexpr size_t kFlagsColumn = 16;  // where the flags begin in a line

using Flag = std::pair<std::string, std::string>;  // name and value
using Flags = std::vector<Flag>;

Flags full_recompute() {
  return {{"recompute-granularity", "full"},
          {"recompute-method", "uniform"},
          {"recompute-num-layers", "1"}};
}

// Of modules that take less time than whole layers.
Flags selective_recompute(const ModelConfig& config) {
  Flags flags = {{"recompute-granularity", "selective"}, {"recompute-modules", "layernorm"}};
  const auto add = [&](const char* module) { flags.emplace_back("recompute-modules", module); };
  if (config.num_experts > 0) {
    add("moe_act");
    add("moe_permute");
  }
  if (config.multi_latent_attention) add("mla_up_proj");
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.is_moe_layer(layer)) continue;
    add("mlp");
    break;
  }
  return flags;
}

// What can be asked for beside these options.
std::vector<Flags> candidates_of(const Options& options) {
  std::vector<Flags> candidates;
  if (options.micro_batch_size > 1) {
    candidates.push_back({{"micro-batch-size", std::to_string(options.micro_batch_size / 2)}});
  }
  if (!options.recompute_granularity) {
    candidates.push_back(selective_recompute(load_model_config(options)));
    candidates.push_back(full_recompute());
  }
  if (options.expert_model_parallel_size > 1 &&
      (options.moe_expert_rank_capacity_factor.value_or(0) == 0 ||
       *options.moe_expert_rank_capacity_factor > kEnoughRoom)) {
    candidates.push_back({{"moe-expert-rank-capacity-factor", fmt::format("{}", kEnoughRoom)}});
  }
  if (options.expert_model_parallel_size > 1 && !options.moe_paged_stash.value_or(false)) {
    candidates.push_back({{"moe-paged-stash", ""}});
  }
  if (data_parallel_size_of(options) > 1 && !options.use_megatron_fsdp) {
    if (!options.use_distributed_optimizer)
      candidates.push_back({{"use-distributed-optimizer", ""}});
    if (options.optimizer == OptimizerKind::muon)
      candidates.push_back({{"optimizer", "dist_muon"}});
    candidates.push_back({{"use-megatron-fsdp", ""}});
  }
  if (options.exp_avg_dtype == DType::f32 && options.exp_avg_sq_dtype == DType::f32) {
    candidates.push_back({{"use-precision-aware-optimizer", ""},
                          {"exp-avg-dtype", "bf16"},
                          {"exp-avg-sq-dtype", "bf16"}});
  }
  if (options.device == Device::cuda && !options.optimizer_cpu_offload) {
    candidates.push_back({{"optimizer-cpu-offload", ""}});
  }
  if (options.compute_dtype == DType::f64) candidates.push_back({{"compute-dtype", "fp32"}});
  return candidates;
}

// The values of a list follow its flag.
std::string text_of(const Flags& flags) {
  std::string text;
  std::string_view last;
  for (const auto& [name, value] : flags) {
    if (name != last) text += fmt::format("{}--{}", text.empty() ? "" : " ", name);
    if (!value.empty()) text += " " + value;
    last = name;
  }
  return text;
}

// A step with some flags beside the others.
struct Tried {
  MemoryRemedy remedy;
  std::optional<double> seconds;  // of a sample
};

// Nothing where the flags do not go with the others.
std::optional<Tried> try_flags(Options options, const Flags& flags, int32_t rank) {
  try {
    for (const auto& [name, value] : flags) {
      set_option(options, *find_option(name), value.empty() ? "true" : value);
    }
    check_options(options);
    const StepSpec spec = step_spec_of(options, load_model_config(options));
    const ModelState state = spec.state_of(rank);
    const TrainingStep step = build_training_step(spec.model, state, spec.options);
    const auto planned = [&](const Program& program) { return plan_program(program, options); };
    MemoryPlan plan = planned(*step.program);
    Tried tried;
    if (const std::optional<GpuCluster> cluster = gpu_cluster_of(options, spec.model)) {
      const Layout& layout = spec.layout->layout;
      tried.seconds = seconds_alone(time_program(*step.program, plan, *cluster, layout, rank),
                                    cluster->model.launch_seconds) /
                      (spec.options.micro_batches * spec.options.micro_batch_size * layout.dp());
    }
    plan_fallback_step(spec.model, state, spec.options, step, plan, planned);
    tried.remedy = {text_of(flags), plan.total_bytes(), plan.host_bytes(), std::nullopt};
    return tried;
  } catch (const UserError&) {
    return std::nullopt;
  }
}

// All state sharded among as many ranks as it takes, with `beside`. Sharding among N ranks leaves
// at least an Nth of the bytes; the search begins where that fits.
std::optional<MemoryRemedy> try_more_ranks(const Options& options, const Flags& beside,
                                           int32_t rank, uint64_t bytes, uint64_t available) {
  Options more = options;
  more.fake_process_group = true;  // they need not all fit into this process
  int64_t ranks = 2 * int64_t{options.ranks};
  while (ranks <= kMostRanks && bytes / static_cast<uint64_t>(ranks) > available) ranks *= 2;
  for (int32_t tried = 0; tried < kRankCountsTried && ranks <= kMostRanks; ++tried, ranks *= 2) {
    more.ranks = static_cast<int32_t>(ranks);
    const int32_t least_batch = options.micro_batch_size * data_parallel_size_of(more);
    if (more.global_batch_size && *more.global_batch_size < least_batch) {
      more.global_batch_size = least_batch;
    }
    Flags flags = {options.gpus.empty() ? Flag("ranks", std::to_string(ranks))
                                        : Flag("gpus", with_gpus(options.gpus, ranks))};
    if (!options.use_megatron_fsdp) flags.push_back({"use-megatron-fsdp", ""});
    flags.insert(flags.end(), beside.begin(), beside.end());
    std::optional<Tried> step = try_flags(more, flags, rank);
    if (step && step->remedy.bytes <= available) return std::move(step->remedy);
  }
  return std::nullopt;
}

// With activations made again where they alone are too many.
std::optional<MemoryRemedy> try_more_ranks(const Options& options, int32_t rank, uint64_t bytes,
                                           uint64_t available) {
  auto found = try_more_ranks(options, {}, rank, bytes, available);
  if (found || options.recompute_granularity) return found;
  return try_more_ranks(options, full_recompute(), rank, bytes, available);
}

}  // namespace

std::vector<MemoryRemedy> find_remedies(const Options& options, int32_t rank, uint64_t bytes,
                                        uint64_t available) {
  const std::optional<Tried> without =
      options.gpus.empty() ? std::nullopt : try_flags(options, {}, rank);
  const auto enough = static_cast<uint64_t>((1 - kLeastSaving) * static_cast<double>(bytes));
  std::vector<MemoryRemedy> remedies;
  for (const Flags& flags : candidates_of(options)) {
    std::optional<Tried> tried = try_flags(options, flags, rank);
    if (!tried || tried->remedy.bytes > enough) continue;
    if (without && tried->seconds) tried->remedy.slowdown = *tried->seconds / *without->seconds - 1;
    remedies.push_back(std::move(tried->remedy));
  }
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const MemoryRemedy& a, const MemoryRemedy& b) {
                     return std::pair(a.slowdown, a.bytes) < std::pair(b.slowdown, b.bytes);
                   });
  if (auto remedy = try_more_ranks(options, rank, bytes, available)) {
    remedy->flags += options.device == Device::cuda ? " (each with a GPU of its own)"
                                                    : " (on as many machines of this size)";
    remedies.push_back(std::move(*remedy));
  }
  return remedies;
}

std::string describe_remedies(const Options& options, int32_t rank, uint64_t bytes,
                              uint64_t available) {
  const std::vector<MemoryRemedy> remedies = find_remedies(options, rank, bytes, available);
  if (remedies.empty()) {
    return "Use a shorter --seq-length, a smaller model, or more ranks that share it "
           "(docs/layouts.md).\n";
  }
  std::string text = wrap_text(
      fmt::format("What makes {} smaller, one by one{} (docs/memory.md):",
                  options.ranks > 1 ? fmt::format("the {} of rank {}", format_bytes(bytes), rank)
                                    : fmt::format("the {}", format_bytes(bytes)),
                  remedies.front().slowdown ? ", what costs least time first" : ""),
      kDefaultColumns, 2);
  text += "\n";
  for (const MemoryRemedy& remedy : remedies) {
    std::string line = fmt::format("  {:>12}  {}", format_bytes(remedy.bytes), remedy.flags);
    if (remedy.slowdown) {
      const double percent = std::round(100 * *remedy.slowdown) + 0.0;  // without -0
      line += fmt::format(" ({:+.0f} % time)", percent);
    }
    if (remedy.host_bytes > 0) {
      line += fmt::format(" ({} on the host)", format_bytes(remedy.host_bytes));
    }
    text += wrap_text(line, kDefaultColumns, kFlagsColumn - line.find_first_not_of(' ')) + "\n";
  }
  return text;
}

RankSession::Remedies remedies_of_training(const Options& options, int32_t rank) {
  return [&options, rank](uint64_t bytes, uint64_t available) {
    std::string text = describe_remedies(options, rank, bytes, available);
    text.pop_back();  // the newline
    return text;
  };
}

}  // namespace troupe
