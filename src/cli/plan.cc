// `troupe plan`: whether a training run fits this machine, before it starts.
//
// It builds, verifies and plans the program that `train` would run and allocates nothing. How long
// a step will take is said of the GPUs of --gpus (plan_verdict.h), for which --search looks for the
// best layout (plan_search.h). Beyond data parallelism it shows the layout (plan_layout.h) and
// builds a program of each class of ranks, where these are few or --fake-process-group asks for it.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/units.h"
#include "cli/command.h"
#include "cli/plan_layout.h"
#include "cli/plan_search.h"
#include "cli/plan_verdict.h"
#include "data/json_text.h"
#include "options/cluster_options.h"
#include "options/device_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/rank_plans.h"
#include "program/verify.h"
#include "runtime/device_memory.h"
#include "train/expert_room_choice.h"
#include "train/gpu_choices.h"
#include "train/interrupt.h"
#include "train/memory_remedies.h"
#include "train/rank_hardware.h"
#include "train/slow_kernels.h"
#include "train/terminal.h"

namespace troupe {
namespace {

// With more ranks than these, programs are built when they are asked for.
constexpr int32_t kMostBuiltRanks = 64;

struct Planned {
  const ModelConfig& model;
  const TrainingStepOptions& step;
  int32_t ranks = 1;
  MemoryPlan memory = {};
  std::string peak_operation = {};          // where most transient bytes are live
  double operation_flops = 0;               // of all operations of the step
  std::vector<KernelVariant> kernels = {};  // on a GPU
  int64_t parameters = 0;
  int64_t active_parameters = 0;
  double model_flops = 0;          // of the model's products alone
  uint64_t without_recompute = 0;  // bytes of a rank; 0: nothing is recomputed
  uint64_t without_offload = 0;    // the same; 0: no activations are offloaded
  int32_t sharing = 1;             // ranks of this machine, or of a GPU
  MemoryOffer offer = {};
};

// Of all ranks.
int64_t micro_batches_of(const Planned& planned) {
  return int64_t{planned.step.micro_batches} * planned.ranks;
}

Planned make_plan(const Options& options, const StepSpec& spec) {
  Planned planned{.model = spec.model, .step = spec.options, .ranks = options.ranks};
  const ModelState state = spec.state_of(/*rank=*/0);
  const TrainingStep step = build_training_step(spec.model, state, spec.options);
  verify_program(*step.program);
  const DeviceSpec device = device_spec_of(options);
  const int threads = device.threads_per_rank();
  const DeviceTraits gpu = planned_traits();
  planned.memory = plan_memory(*step.program, threads, options.device, gpu);
  verify_memory_plan(*step.program, planned.memory);

  planned.without_recompute =
      bytes_without_recompute(spec.model, state, spec.options, threads, options.device, gpu);
  planned.without_offload =
      bytes_without_offload(spec.model, state, spec.options, threads, options.device, gpu);
  planned.peak_operation =
      describe_operation(*step.program, peak_operation(planned.memory.live_bytes));
  planned.operation_flops = planned.ranks * count_flops(*step.program);
  if (options.device == Device::cuda) planned.kernels = kernel_variants(*step.program, gpu);
  planned.parameters = state.model->parameter_count();
  planned.active_parameters = state.model->active_parameter_count();
  planned.model_flops = state.model->training_flops(planned.step.sequence) *
                        planned.step.micro_batch_size *
                        static_cast<double>(micro_batches_of(planned));
  // Ranks differ in the numbers of their micro-batches alone.
  planned.sharing = ranks_that_share(device, /*group=*/nullptr, options.device);
  planned.offer =
      offer_memory(options, static_cast<uint64_t>(planned.sharing) * planned.memory.total_bytes());
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
  nlohmann::ordered_json host_bytes;
  for (const Role role : {Role::optimizer, Role::offloaded}) {
    host_bytes[std::string(name_of(role))] =
        planned.memory.host_bytes_by_role[static_cast<size_t>(role)];
  }
  host_bytes["total"] = planned.memory.host_bytes();
  nlohmann::ordered_json document = {{"fits", planned.offer.fits()},
                                     {"ranks", planned.ranks},
                                     {"bytes", std::move(bytes)},
                                     {"host_bytes", std::move(host_bytes)},
                                     {"available_bytes", planned.offer.available},
                                     {"peak_operation", planned.peak_operation},
                                     {"parameters", planned.parameters},
                                     {"active_parameters", planned.active_parameters},
                                     {"micro_batches", micro_batches_of(planned)},
                                     {"tokens_per_step", tokens_per_step(planned)},
                                     {"model_flops_per_step", planned.model_flops},
                                     {"operation_flops_per_step", planned.operation_flops}};
  if (planned.offer.available == 0) document["available_bytes"] = nullptr;
  if (planned.without_recompute > 0) {
    document["bytes_without_recompute"] = planned.without_recompute;
  }
  if (planned.without_offload > 0) document["bytes_without_offload"] = planned.without_offload;
  if (!planned.kernels.empty()) document["kernels"] = kernels_json(planned.kernels);
  return printed_json(document);
}

std::string make_text(const Options& options, const Planned& planned) {
  std::string text = describe_model(options, planned.model);
  text += fmt::format(
      "step    {} of {} x {} tokens: {} tokens\n",
      micro_batches_of(planned) == 1 ? "1 micro-batch"
                                     : fmt::format("{} micro-batches", micro_batches_of(planned)),
      planned.step.micro_batch_size, planned.step.sequence, tokens_per_step(planned));
  text += fmt::format("flops   {} of the model, {} in all operations\n\n",
                      format_count(planned.model_flops), format_count(planned.operation_flops));

  const auto add_roles = [&](const std::array<uint64_t, kRoleCount>& bytes_by_role,
                             const char* where) {
    for (size_t role = 0; role < bytes_by_role.size(); ++role) {
      if (bytes_by_role[role] == 0) continue;
      text += fmt::format("  {:<14}{:>12}{}\n", name_of(static_cast<Role>(role)),
                          format_bytes(bytes_by_role[role]), where);
    }
  };
  // Of a GPU's run what lies on the host is no part of the total.
  const bool on_gpu = planned.memory.device == Device::cuda;
  add_roles(planned.memory.bytes_by_role, "");
  if (!on_gpu) add_roles(planned.memory.host_bytes_by_role, "   offloaded to the host");
  text += fmt::format("  {:<14}{:>12}\n", "total", format_bytes(planned.memory.total_bytes()));
  if (on_gpu) add_roles(planned.memory.host_bytes_by_role, "   in the host's memory");
  if (planned.without_recompute > 0) {
    text +=
        fmt::format("  {:<14}{:>12}\n", "if all is kept", format_bytes(planned.without_recompute));
  }
  if (planned.without_offload > 0) {
    text += fmt::format("  {:<14}{:>12}\n", "no offload", format_bytes(planned.without_offload));
  }
  text += fmt::format("  largest at {}\n", planned.peak_operation);
  text += kernels_text(planned.kernels);
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
  text += fmt::format("It does not fit: {} are missing.\n",
                      format_bytes(planned.offer.needed - planned.offer.available));
  return text + describe_remedies(options, /*rank=*/0, planned.memory.total_bytes(),
                                  planned.offer.available);
}

void warn_of_kernels(const Options& options, const std::vector<KernelVariant>& kernels) {
  for (const std::string& line : warn_of_slow_kernels(kernels, planned_traits_of(options))) {
    print_note(line);
  }
}

void print_text(const std::string& text) {
  fmt::print("{}", wrap_text(text, kDefaultColumns, 8));
}

}  // namespace

ExitStatus run_plan(const Options& asked) {
  if (asked.search) return run_plan_search(asked);
  end_at_once_when_interrupted(/*quiet=*/false);
  const ModelConfig config = load_model_config(asked);
  const Options options = with_gpu_choices(asked, config, usable_bytes_of_gpu(asked));
  for (const std::string& note : notes_on_gpu_choices(asked, options)) print_note(note);
  const StepSpec step = step_spec_of(options, config);
  const Layout& layout = step.layout->layout;
  const bool only_data_parallel =
      layout.dp() == layout.world_size() && layout.edp() == layout.world_size();
  if (!only_data_parallel || options.ranks > kMostThreadRanks || options.fake_process_group) {
    std::optional<RanksReport> report;
    if (options.fake_process_group || options.ranks <= kMostBuiltRanks) {
      report = check_ranks(options, step);
    }
    const RanksReport* shown = report ? &*report : nullptr;
    if (shown != nullptr) warn_of_kernels(options, shown->kernels());
    if (shown != nullptr && shown->cluster && !options.json) {
      fmt::print("{}\n", verdict_text(verdict_of(options, step, *shown)));
    }
    if (options.json) {
      fmt::print("{}", make_layout_json(options, step, shown));
    } else {
      print_text(make_layout_text(options, step, shown));
      if (shown != nullptr && !shown->memory.fits()) {
        const RankPlan& fullest = shown->fullest();
        print_text(describe_remedies(options, fullest.first_rank, fullest.total_bytes,
                                     shown->memory.available));
      }
    }
    // This machine must have room for all ranks only where they are to run on it.
    const bool is_verdict = !options.fake_process_group || !options.gpus.empty();
    return report && !report->memory.fits() && is_verdict ? ExitStatus::does_not_fit
                                                          : ExitStatus::done;
  }
  const Planned planned = make_plan(options, step);
  warn_of_kernels(options, planned.kernels);
  if (options.json) {
    fmt::print("{}", make_json(planned));
  } else {
    print_text(make_text(options, planned));
  }
  return planned.offer.fits() ? ExitStatus::done : ExitStatus::does_not_fit;
}

}  // namespace troupe
