// `troupe plan`: whether a training run fits this machine, before it starts.
//
// It builds, verifies and plans the program that `train` would run and allocates nothing. How long
// a step will take is not predicted: that needs a cost model of the machine. Beyond data
// parallelism it shows the layout (plan_layout.h) and builds a program of each class of ranks,
// where these are few or --fake-process-group wants it.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/units.h"
#include "cli/command.h"
#include "cli/plan_layout.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/rank_plans.h"
#include "program/verify.h"
#include "runtime/device_memory.h"
#include "train/model_options.h"

namespace troupe {
namespace {

// With more ranks than these, programs are built when they are asked for.
constexpr int32_t kMostBuiltRanks = 64;

struct Planned {
  ModelConfig config;
  int32_t ranks = 1;
  TrainingStepOptions step;
  MemoryPlan memory;
  std::string peak_operation;      // where most transient bytes are live
  double operation_flops = 0;      // of all operations of the step
  double model_flops = 0;          // of the model's products alone
  uint64_t without_recompute = 0;  // bytes of a rank; 0: nothing is recomputed
  int32_t sharing = 1;             // ranks of this machine, or of a GPU
  MemoryOffer offer;
};

// Of all ranks.
int64_t micro_batches_of(const Planned& planned) {
  return int64_t{planned.step.micro_batches} * planned.ranks;
}

Planned make_plan(const Options& options, const RunLayout& run) {
  Planned planned;
  planned.config = load_model_config(options);
  planned.ranks = options.ranks;
  planned.step = training_step_options(options, planned.config);
  const ModelState state =
      declare_model_state(planned.config, compute_dtype_of(options), /*trained=*/true,
                          {.run = std::make_shared<const RunLayout>(run), .rank = 0});
  const TrainingStep step = build_training_step(planned.config, state, planned.step);
  verify_program(*step.program);
  planned.memory = plan_memory(*step.program, threads_per_rank(options), device_of(options));
  verify_memory_plan(*step.program, planned.memory);

  if (planned.step.recompute.any()) {
    planned.without_recompute = bytes_without_recompute(
        planned.config, state, planned.step, threads_per_rank(options), device_of(options));
  }
  planned.peak_operation =
      describe_operation(*step.program, peak_operation(planned.memory.live_bytes));
  planned.operation_flops = planned.ranks * count_flops(*step.program);
  planned.model_flops = planned.config.training_flops_per_sequence(planned.step.sequence) *
                        planned.step.micro_batch_size *
                        static_cast<double>(micro_batches_of(planned));
  // Ranks differ in the numbers of their micro-batches alone.
  planned.sharing = ranks_that_share(options, /*group=*/nullptr, device_of(options));
  planned.offer = offer_memory(
      device_of(options), static_cast<uint64_t>(planned.sharing) * planned.memory.total_bytes());
  return planned;
}

int64_t tokens_per_step(const Planned& planned) {
  return int64_t{planned.step.sequence} * planned.step.micro_batch_size * micro_batches_of(planned);
}

std::string make_json(const Planned& planned) {
  nlohmann::ordered_json bytes;
  for (int role = 0; role < kRoleCount; ++role) {
    bytes[std::string(name_of(static_cast<Role>(role)))] =
        planned.memory.bytes_by_role[static_cast<size_t>(role)];
  }
  bytes["total"] = planned.memory.total_bytes();
  nlohmann::ordered_json document = {{"fits", planned.offer.fits()},
                                     {"ranks", planned.ranks},
                                     {"bytes", std::move(bytes)},
                                     {"available_bytes", planned.offer.available},
                                     {"peak_operation", planned.peak_operation},
                                     {"parameters", planned.config.parameter_count()},
                                     {"active_parameters", planned.config.active_parameter_count()},
                                     {"micro_batches", micro_batches_of(planned)},
                                     {"tokens_per_step", tokens_per_step(planned)},
                                     {"model_flops_per_step", planned.model_flops},
                                     {"operation_flops_per_step", planned.operation_flops}};
  if (planned.offer.available == 0) document["available_bytes"] = nullptr;
  if (planned.without_recompute > 0) {
    document["bytes_without_recompute"] = planned.without_recompute;
  }
  return document.dump(2) + "\n";
}

std::string make_text(const Options& options, const Planned& planned) {
  std::string text = describe_model(options, planned.config);
  text += fmt::format(
      "step    {} of {} x {} tokens: {} tokens\n",
      micro_batches_of(planned) == 1 ? "1 micro-batch"
                                     : fmt::format("{} micro-batches", micro_batches_of(planned)),
      planned.step.micro_batch_size, planned.step.sequence, tokens_per_step(planned));
  text += fmt::format("flops   {} of the model, {} in all operations\n\n",
                      format_count(planned.model_flops), format_count(planned.operation_flops));

  for (int role = 0; role < kRoleCount; ++role) {
    const uint64_t bytes = planned.memory.bytes_by_role[static_cast<size_t>(role)];
    if (bytes == 0) continue;
    text += fmt::format("  {:<14}{:>12}\n", name_of(static_cast<Role>(role)), format_bytes(bytes));
  }
  text += fmt::format("  {:<14}{:>12}   largest at {}\n", "total",
                      format_bytes(planned.memory.total_bytes()), planned.peak_operation);
  if (planned.without_recompute > 0) {
    text +=
        fmt::format("  {:<14}{:>12}\n", "if all is kept", format_bytes(planned.without_recompute));
  }
  const bool on_gpu = planned.offer.device == Device::cuda;
  const auto sharing = static_cast<uint64_t>(planned.sharing);
  if (sharing > 1) {
    text += fmt::format("  {:<14}{:>12}\n", fmt::format("{} ranks", sharing),
                        format_bytes(planned.offer.needed));
  }
  if (planned.offer.available == 0) {
    return text +
           (on_gpu ? fmt::format("\nThis machine has no GPU to compare with ({}).\n", why_no_gpu())
                   : "\nThis machine does not say how much memory is available.\n");
  }
  text += fmt::format("  {:<14}{:>12}{}\n\n", "available", format_bytes(planned.offer.available),
                      on_gpu ? " on the first GPU" : "");
  if (planned.offer.fits()) return text + "It fits.\n";
  text += fmt::format("It does not fit: {} are missing. ",
                      format_bytes(planned.offer.needed - planned.offer.available));
  if (sharing * planned.memory.state_bytes > planned.offer.available) {
    return text +
           fmt::format(
               "Parameters, gradients and optimizer state alone are too large for this {}.\n",
               on_gpu ? "GPU" : "machine");
  }
  return text +
         "--recompute-granularity, a smaller --micro-batch-size (with the same "
         "--global-batch-size), a smaller --seq-length or --compute-dtype bf16 need fewer bytes "
         "for "
         "activations.\n";
}

}  // namespace

ExitStatus run_plan(const Options& options) {
  const ModelConfig config = load_model_config(options);
  const RunLayout run = run_layout_of(options, config);
  const Layout& layout = run.layout;
  const bool only_data_parallel =
      layout.dp() == layout.world_size() && layout.edp() == layout.world_size();
  if (!only_data_parallel || options.ranks > kMostThreadRanks || options.fake_process_group) {
    std::optional<RanksReport> report;
    if (options.fake_process_group || options.ranks <= kMostBuiltRanks) {
      report = check_ranks(options, config, run);
    }
    const RanksReport* shown = report ? &*report : nullptr;
    fmt::print("{}", options.json ? make_layout_json(options, run, shown)
                                  : make_layout_text(options, run, shown));
    // A machine for all ranks is wanted of those only that shall run on it.
    return report && !report->memory.fits() && !options.fake_process_group
               ? ExitStatus::does_not_fit
               : ExitStatus::done;
  }
  const Planned planned = make_plan(options, run);
  fmt::print("{}", options.json ? make_json(planned) : make_text(options, planned));
  return planned.offer.fits() ? ExitStatus::done : ExitStatus::does_not_fit;
}

}  // namespace troupe
