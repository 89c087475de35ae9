#include "cli/plan_verdict.h"

#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/units.h"
#include "model/parameters.h"
#include "passes/memory_layout.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

// docs/benchmarks/plan_time.md says where these come from.
constexpr double kErrorInNode = 0.12;  // measured GPUs that NVLink joins
constexpr double kErrorBeyond = 0.40;  // networks, CPUs, GPUs known by data sheets, short steps
constexpr double kShortStep = 0.02;    // made of small kernels, whose times are mostly overhead

std::vector<std::pair<std::string, double>> parts_of(const StepTime& time) {
  std::vector<std::pair<std::string, double>> parts;
  for (size_t i = 0; i < time.compute.size(); ++i) {
    parts.emplace_back(name_of(static_cast<TimePart>(i)), time.compute[i]);
  }
  for (size_t i = 0; i < time.exposed.size(); ++i) {
    parts.emplace_back(fmt::format("exchange over {}", name_of(static_cast<RankGroup>(i))),
                       time.exposed[i]);
  }
  parts.emplace_back("copies from the host", time.copies);
  parts.emplace_back("pipeline bubble", time.bubble);
  parts.emplace_back("between operations", time.idle);
  std::erase_if(parts, [](const auto& part) { return part.second <= 0; });
  return parts;
}

// Times an even load; 0: any load.
double room_of(const ExpertRows& rows) {
  if (rows.even == 0 || !rows.has_fallback) return 0;
  return static_cast<double>(rows.planned) / static_cast<double>(rows.even);
}

std::string experts_text(const ExpertRows& rows) {
  if (rows.even == 0 || (rows.planned == rows.even && !rows.has_fallback)) return {};
  if (!rows.has_fallback) return "; experts: any load";
  return fmt::format("; experts up to {:.2f} x even", room_of(rows));
}

std::optional<Verdict::Load> load_of(const ExpertLoad& load, const RunLayout& run) {
  if (load.is_even()) return std::nullopt;
  const int32_t ranks = run.layout.ep();
  return Verdict::Load{.ranks = ranks,
                       .mean = load.mean(ranks),
                       .largest = load.largest(ranks),
                       .has_copies = run.expert_clones > 0};
}

// "load: 1.31 x even on the fullest rank, 1.62 in the worst layer; room for 1.50".
std::string load_text(const Verdict& verdict) {
  if (!verdict.load) return {};
  const auto& [ranks, mean, largest, has_copies] = *verdict.load;
  if (ranks == 1) return "load: each rank has all experts, so it makes no difference\n";
  std::string text = fmt::format("load: {:.2f} x even on the fullest rank{}", mean,
                                 has_copies ? " after copies" : "");
  if (largest > mean) text += fmt::format(", {:.2f} in the worst layer", largest);
  const double room = room_of(verdict.expert_rows);
  if (room > 0) text += fmt::format("; room for {:.2f}", room);
  text += "\n";
  if (room > 0 && largest > room) {
    text += "      that is too much: steps run again in rounds, which is not counted here\n";
  }
  return text;
}

// What a checkpoint holds: weights, master weights and the optimizer's states, each once.
uint64_t checkpoint_bytes_of(const StepSpec& step) {
  RunLayout whole = layout_of_one_rank(step.model.num_layers, step.model.mtp_num_layers);
  whole.optimizer = step.layout->optimizer;
  whole.weight_codes = step.layout->weight_codes;
  const ModelState state =
      declare_model_state(step.model, step.dtype, /*trained=*/true,
                          {.run = std::make_shared<const RunLayout>(std::move(whole)), .rank = 0});
  return StateLayout(*state.table).lasting_bytes;
}

// "run: 1 k steps in 2.31 days, 887 GPU-hours; a checkpoint has 12 GiB, saved in 3 s".
std::string run_text(const Verdict& verdict) {
  std::string checkpoint =
      fmt::format("a checkpoint has {}", format_bytes(verdict.checkpoint_bytes));
  if (verdict.save_seconds > 0) {
    checkpoint += fmt::format(", saved in {}", format_duration(verdict.save_seconds));
  }
  if (verdict.steps == 0) return "run: " + checkpoint + "\n";
  const double hours = verdict.steps * verdict.time.seconds / 3600;
  const std::string length =
      hours < 48 ? fmt::format("{:.3g} hours", hours) : fmt::format("{:.3g} days", hours / 24);
  return fmt::format("run: {} steps in {}, {} GPU-hours; {}\n", format_count(verdict.steps), length,
                     format_count(hours * verdict.gpus), checkpoint);
}

}  // namespace

Verdict verdict_of(const Options& options, const StepSpec& step, const RanksReport& report) {
  const RunLayout& run = *step.layout;
  const GpuCluster& cluster = *report.cluster;
  Verdict verdict{.memory = report.memory,
                  .fullest_rank = report.fullest().first_rank,
                  .expert_rows = report.least_room(),
                  .load = load_of(cluster.expert_load, run),
                  .gpus = cluster.gpus,
                  .time = report.time,
                  .limit = report.memory.fits() ? std::string(limit_of(report.time)) : "memory"};
  const int32_t sequence = step.options.sequence;
  const double sequences = static_cast<double>(run.schedule.micro_batches) *
                           step.options.micro_batch_size * run.layout.dp();
  if (options.train_iters) {
    verdict.steps = static_cast<double>(*options.train_iters);
  } else if (options.train_samples) {
    verdict.steps = static_cast<double>(*options.train_samples) / sequences;
  } else if (options.train_tokens) {
    verdict.steps = std::ceil(*options.train_tokens / (sequences * sequence));
  }
  verdict.checkpoint_bytes = checkpoint_bytes_of(step);
  if (cluster.model.storage_bandwidth > 0) {
    verdict.save_seconds =
        static_cast<double>(verdict.checkpoint_bytes) / cluster.model.storage_bandwidth;
  }
  const double of_gpu = report.time.seconds * cluster.gpus;
  verdict.tokens_per_s = sequences * sequence / of_gpu;
  verdict.flops_per_s = Model(step.model).training_flops(sequence) * sequences / of_gpu;
  const bool in_node = cluster.gpus <= cluster.model.gpus_per_node;
  const bool is_gpu = cluster.model.traits.compute_capability != kNoGpu;
  const bool is_like_measured =
      cluster.model.measured && in_node && is_gpu && report.time.seconds >= kShortStep;
  verdict.error = is_like_measured ? kErrorInNode : kErrorBeyond;
  return verdict;
}

std::string verdict_text(const Verdict& verdict) {
  const MemoryOffer& memory = verdict.memory;
  const auto gib = [](uint64_t bytes) { return static_cast<double>(bytes) / 0x1p30; };
  const bool fits = memory.fits();
  std::string text = fmt::format(
      "{}: {:.2f} of {:.2f} GiB on rank {}, {:.2f} {}{}\n", fits ? "fits" : "does not fit",
      gib(memory.needed), gib(memory.available), verdict.fullest_rank,
      gib(fits ? memory.available - memory.needed : memory.needed - memory.available),
      fits ? "left" : "missing", fits ? experts_text(verdict.expert_rows) : "");
  text += fmt::format("speed: {:.0f} tokens/s and {:.0f} model TFLOP/s per GPU, +- {:.0f} %\n",
                      verdict.tokens_per_s, verdict.flops_per_s / 1e12, 100 * verdict.error);
  const StepTime& time = verdict.time;
  const auto percent = [&](double seconds) { return 100 * seconds / time.seconds; };
  text += fmt::format(
      "limit: {}; compute {:.0f}, memory {:.0f}, links {:.0f}, bubble {:.0f}, host {:.0f} %\n",
      verdict.limit, percent(time.products()), percent(time.memory()),
      percent(time.exposed_seconds()), percent(time.bubble), percent(time.copies + time.idle));
  text += load_text(verdict);
  text += run_text(verdict);
  text += fmt::format("\nTime of a step: {}\n", format_duration(time.seconds));
  for (const auto& [name, seconds] : parts_of(time)) {
    text += fmt::format("  {:<36} {:>9}  {:>5.1f} %\n", name, format_duration(seconds),
                        percent(seconds));
  }
  return text;
}

void add_verdict_json(ordered_json& document, const Verdict& verdict) {
  document["verdict"] = {{"fits", verdict.memory.fits()},
                         {"fullest_rank", verdict.fullest_rank},
                         {"tokens_per_s_per_gpu", verdict.tokens_per_s},
                         {"model_flops_per_s_per_gpu", verdict.flops_per_s},
                         {"error", verdict.error},
                         {"limit", verdict.limit},
                         {"checkpoint_bytes", verdict.checkpoint_bytes}};
  if (verdict.load) {
    ordered_json load = {{"mean", verdict.load->mean}, {"largest", verdict.load->largest}};
    const double room = room_of(verdict.expert_rows);
    load["room"] = room > 0 ? ordered_json(room) : ordered_json();
    document["verdict"]["expert_load"] = std::move(load);
  }
  if (verdict.save_seconds > 0) document["verdict"]["save_seconds"] = verdict.save_seconds;
  if (verdict.steps > 0) {
    const double seconds = verdict.steps * verdict.time.seconds;
    document["verdict"]["steps"] = verdict.steps;
    document["verdict"]["seconds"] = seconds;
    document["verdict"]["gpu_hours"] = seconds * verdict.gpus / 3600;
  }
  ordered_json parts;
  for (const auto& [name, seconds] : parts_of(verdict.time)) parts[name] = seconds;
  document["time"] = {{"seconds", verdict.time.seconds}, {"parts", std::move(parts)}};
}

}  // namespace troupe
