#include "cli/ranks_report.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "base/machine.h"
#include "base/text.h"
#include "base/units.h"
#include "options/cluster_options.h"
#include "options/device_options.h"
#include "runtime/device_memory.h"
#include "train/expert_room_choice.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

uint64_t peak_process_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

uint64_t bytes_of(const RankPlan& plan, Role role) {
  return plan.bytes_by_role[static_cast<size_t>(role)];
}

constexpr std::array kColumns = {Role::parameter,  Role::gradient,  Role::optimizer,
                                 Role::activation, Role::workspace, Role::communication};

// What has no column of its own because it is small, or because few runs offload.
uint64_t other_bytes(const RankPlan& plan) {
  uint64_t bytes = plan.total_bytes;
  for (const Role role : kColumns) bytes -= bytes_of(plan, role);
  return bytes;
}

// One for all numbers of a table, which then have at most four digits before the point.
struct MemoryUnit {
  const char* name;
  double bytes;
};
MemoryUnit unit_for(uint64_t largest) {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  if (largest < kGiB) return {"MiB", 0x1p20};
  return largest < 9999 * kGiB ? MemoryUnit{"GiB", 0x1p30} : MemoryUnit{"TiB", 0x1p40};
}

int64_t sum_of(const RanksReport& report, int64_t RankPlan::*member) {
  int64_t sum = 0;
  for (const RankPlan& plan : report.classes) sum += plan.*member * plan.ranks;
  return sum;
}

std::string programs_line(const RanksReport& report) {
  int64_t ranks = 0;
  for (const RankPlan& plan : report.classes) ranks += plan.ranks;
  return fmt::format(
      "  {} ranks run {} different programs; {} operations, {} collectives and {} messages fit "
      "together\n",
      ranks, report.classes.size(),
      format_count(static_cast<double>(sum_of(report, &RankPlan::operations))),
      format_count(static_cast<double>(sum_of(report, &RankPlan::collectives))),
      format_count(static_cast<double>(sum_of(report, &RankPlan::messages))));
}

std::string describe_offer(const MemoryOffer& offer) {
  const bool on_gpu = offer.device == Device::cuda;
  if (offer.available == 0) {
    return on_gpu ? fmt::format(
                        "Each GPU needs at most {}. This machine has none to compare with ({}).\n",
                        format_bytes(offer.needed), why_no_gpu())
                  : "This machine does not say how much memory is available.\n";
  }
  if (!offer.gpus.empty()) {
    return fmt::format("Each GPU needs at most {}; a run can use {} of each of --gpus {}: {}.\n",
                       format_bytes(offer.needed), format_bytes(offer.available),
                       printable(offer.gpus), offer.fits() ? "it fits" : "it does not fit");
  }
  if (on_gpu) {
    return fmt::format("Each GPU needs at most {}; {} are available on the first one here: {}.\n",
                       format_bytes(offer.needed), format_bytes(offer.available),
                       offer.fits() ? "it fits" : "it does not fit");
  }
  return fmt::format(
      "All ranks together need {}; {} are available here: as threads of one process "
      "they {}.\n",
      format_bytes(offer.needed), format_bytes(offer.available),
      offer.fits() ? "fit" : "do not fit");
}

// Of all ranks.
Exposure exposure_of(const RanksReport& report) {
  Exposure sum;
  for (const RankPlan& plan : report.classes) {
    sum.exchanges += plan.expert_exchange.exchanges * plan.ranks;
    sum.covered += plan.expert_exchange.covered * plan.ranks;
    sum.flops += plan.expert_exchange.flops * plan.ranks;
  }
  return sum;
}

uint64_t sum_of_bytes(const RanksReport& report, uint64_t RankPlan::*member) {
  uint64_t sum = 0;
  for (const RankPlan& plan : report.classes) {
    sum += plan.*member * static_cast<uint64_t>(plan.ranks);
  }
  return sum;
}

StepTime time_of_step(const RanksReport& report, const Layout& layout) {
  std::vector<const TimedProgram*> programs;
  for (const RankPlan& plan : report.classes) programs.push_back(&plan.timed);
  return simulate_slowest(programs, layout.pp(), report.cluster->model.launch_seconds);
}

// What waits on the host: of all ranks.
uint64_t bytes_on_host(const RanksReport& report, Role role) {
  uint64_t sum = 0;
  for (const RankPlan& plan : report.classes) {
    sum += plan.host_bytes_by_role[static_cast<size_t>(role)] * static_cast<uint64_t>(plan.ranks);
  }
  return sum;
}

ordered_json host_json(const RankPlan& plan) {
  ordered_json bytes;
  for (const Role role : {Role::optimizer, Role::offloaded}) {
    bytes[std::string(name_of(role))] = plan.host_bytes_by_role[static_cast<size_t>(role)];
  }
  return bytes;
}

// What a rank of the class sends in a step, by group.
ordered_json links_json(const RankPlan& plan) {
  ordered_json links = ordered_json::array();
  for (const GroupTraffic& group : plan.links) {
    links.push_back({{"group", name_of(group.group)},
                     {"ranks", group.ranks},
                     {"operations", group.operations},
                     {"bytes", group.sent.bytes},
                     {"messages", group.sent.messages}});
  }
  return links;
}

}  // namespace

MemoryOffer offer_memory(const Options& options, uint64_t needed) {
  return {.device = options.device,
          .gpus = options.gpus,
          .needed = needed,
          .available =
              options.device == Device::cpu ? available_memory_bytes() : usable_gpu_bytes(options)};
}

uint64_t RanksReport::total_bytes() const {
  return sum_of_bytes(*this, &RankPlan::total_bytes);
}

const RankPlan& RanksReport::fullest() const {
  return *std::max_element(
      classes.begin(), classes.end(),
      [](const RankPlan& a, const RankPlan& b) { return a.total_bytes < b.total_bytes; });
}

ExpertRows RanksReport::least_room() const {
  ExpertRows least;
  for (const RankPlan& plan : classes) {
    const ExpertRows& rows = plan.expert_rows;
    if (rows.even == 0) continue;
    if (least.even == 0 || rows.planned * least.even < least.planned * rows.even) least = rows;
  }
  return least;
}

std::vector<KernelVariant> RanksReport::kernels() const {
  std::vector<KernelVariant> all;
  for (const RankPlan& plan : classes) add_variants(all, plan.kernels);
  return all;
}

std::string kernels_text(const std::vector<KernelVariant>& kernels) {
  const std::string lines = text_of(kernels);
  return lines.empty() ? "" : "\nKernels, by the operations of a step\n" + lines;
}

ordered_json kernels_json(const std::vector<KernelVariant>& kernels) {
  ordered_json list = ordered_json::array();
  for (const KernelVariant& kernel : kernels) {
    list.push_back({{"kind", kernel.kind},
                    {"variant", kernel.variant},
                    {"slow", kernel.slow != SlowKernel::no},
                    {"operations", kernel.operations}});
    if (kernel.multiprocessors > 0) list.back()["multiprocessors"] = kernel.multiprocessors;
  }
  return list;
}

RanksReport check_ranks(const Options& options, const StepSpec& step) {
  const auto start = std::chrono::steady_clock::now();
  RanksReport report;
  const DeviceSpec spec = device_spec_of(options);
  const Device device = spec.device;
  const RunLayout& run = *step.layout;
  {
    report.cluster = gpu_cluster_of(options, step.model);
    WorkProgress progress(options.quiet, "planning", "programs");
    report.classes =
        plan_ranks(step.model, step.dtype, step.layout, step.options, spec.threads_per_rank(),
                   spec.thread_count(), device, planned_traits_of(options), progress.report(),
                   report.cluster ? &*report.cluster : nullptr);
  }
  if (step.model.num_experts > 0 && run.layout.ep() > 1) {
    const int32_t rank = report.fullest().first_rank;
    report.bytes_of_even_load = step_bytes_with_room(options, step.model, rank, 1);
    report.bytes_of_most_load = run.expert_room == 0
                                    ? report.fullest().total_bytes
                                    : step_bytes_with_room(options, step.model, rank, 0);
  }
  report.stash_factor = step.options.stash.factor;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.peak_bytes = peak_process_bytes();
  const uint64_t needed =
      device == Device::cpu
          ? report.total_bytes()
          : largest_gpu_bytes(report.classes,
                              classify_ranks(step.model, step.dtype, step.layout).class_of_rank,
                              options.ranks_per_gpu);
  if (report.cluster) report.time = time_of_step(report, run.layout);
  report.memory = offer_memory(options, needed);
  return report;
}

std::string make_ranks_text(const RanksReport& report, const Layout& layout) {
  const MemoryUnit unit = unit_for(report.fullest().total_bytes);
  std::string text = fmt::format("Memory of one rank, by what its program is, in {}\n", unit.name);
  text +=
      fmt::format("{:>5} {:>5} {:>3}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>8}\n", "ranks", "first",
                  "pp", "params", "grads", "optim", "activ", "work", "comm", "other", "total");
  const auto cell = [&](uint64_t bytes) {
    return bytes == 0 ? fmt::format("{:>8}", 0)
                      : fmt::format(" {:>7.2f}", static_cast<double>(bytes) / unit.bytes);
  };
  for (const RankPlan& plan : report.classes) {
    text += fmt::format("{:>5} {:>5} {:>3}", plan.ranks, plan.first_rank,
                        layout.dense_place(plan.first_rank).pp);
    for (const Role role : kColumns) text += cell(bytes_of(plan, role));
    text += cell(other_bytes(plan)) + cell(plan.total_bytes) + "\n";
  }
  text += programs_line(report);
  if (const std::string exchange = text_of(exposure_of(report)); !exchange.empty()) {
    text += "  expert exchange: " + exchange + "\n";
  }
  if (const std::string rows = text_of(report.least_room()); !rows.empty()) {
    text += "  experts of a rank: " + rows + "\n";
    text += fmt::format(
        "  fullest rank: {} with room for an even load, {} as planned, {} with room for the most "
        "that may come\n",
        format_bytes(report.bytes_of_even_load), format_bytes(report.fullest().total_bytes),
        format_bytes(report.bytes_of_most_load));
  }
  if (const uint64_t stash = bytes_of(report.fullest(), Role::stash); stash > 0) {
    text += fmt::format(
        "  what experts keep: {} for {:.2f} times an even load over the step; a step that needs "
        "more runs again in rounds\n",
        format_bytes(stash), report.stash_factor);
  }
  if (const std::string sent = text_of(report.classes.front().links); !sent.empty()) {
    text += "  rank 0 sends in a step: " + sent + "\n";
  }
  const std::string total = format_bytes(report.total_bytes());
  if (const uint64_t without = sum_of_bytes(report, &RankPlan::bytes_without_recompute);
      without > 0) {
    text +=
        fmt::format("  recompute: {} instead of {} on all ranks\n", total, format_bytes(without));
  }
  if (const uint64_t without = sum_of_bytes(report, &RankPlan::bytes_without_offload);
      without > 0) {
    text += fmt::format("  offload: {} instead of {} on all ranks; {} of activations on the host\n",
                        total, format_bytes(without),
                        format_bytes(bytes_on_host(report, Role::offloaded)));
  }
  if (const uint64_t states = bytes_on_host(report, Role::optimizer); states > 0) {
    text += fmt::format("  optimizer states on the host: {} of all ranks\n", format_bytes(states));
  }
  text += fmt::format("  built and checked in {}, with at most {} of memory\n\n",
                      format_duration(report.seconds), format_bytes(report.peak_bytes));
  if (const std::string kernels = kernels_text(report.kernels()); !kernels.empty()) {
    text += kernels.substr(1) + "\n";
  }
  return text + describe_offer(report.memory);
}

void add_ranks_json(ordered_json& document, const RanksReport& report, const Layout& layout) {
  document["fits"] = report.memory.fits();
  document["total_bytes"] = report.total_bytes();
  document["needed_bytes"] = report.memory.needed;
  document["available_bytes"] =
      report.memory.available == 0 ? ordered_json() : ordered_json(report.memory.available);
  document["rank_classes"] = ordered_json::array();
  for (const RankPlan& plan : report.classes) {
    ordered_json bytes;
    for (int i = 0; i < kRoleCount; ++i) {
      const auto role = static_cast<Role>(i);
      bytes[std::string(name_of(role))] = bytes_of(plan, role);
    }
    bytes["total"] = plan.total_bytes;
    ordered_json exchange = {{"operations", plan.expert_exchange.exchanges},
                             {"covered", plan.expert_exchange.covered},
                             {"overlapped_flops", plan.expert_exchange.flops}};
    document["rank_classes"].push_back({{"first_rank", plan.first_rank},
                                        {"ranks", plan.ranks},
                                        {"pp", layout.dense_place(plan.first_rank).pp},
                                        {"bytes", std::move(bytes)},
                                        {"host_bytes", host_json(plan)},
                                        {"peak_operation", plan.peak_operation},
                                        {"operations", plan.operations},
                                        {"collectives", plan.collectives},
                                        {"messages", plan.messages},
                                        {"operation_flops", plan.operation_flops},
                                        {"expert_exchange", std::move(exchange)}});
    ordered_json& entry = document["rank_classes"].back();
    entry["links"] = links_json(plan);
    if (!plan.of_kinds.empty()) entry["operation_seconds"] = plan.of_kinds;
    if (!plan.kernels.empty()) entry["kernels"] = kernels_json(plan.kernels);
    if (const ExpertRows& rows = plan.expert_rows; rows.planned != rows.even || rows.has_fallback) {
      entry["expert_rows"] = {
          {"even", rows.even}, {"planned", rows.planned}, {"fallback", rows.has_fallback}};
    }
    if (plan.bytes_without_recompute > 0) {
      entry["bytes_without_recompute"] = plan.bytes_without_recompute;
    }
    if (plan.bytes_without_offload > 0) {
      entry["bytes_without_offload"] = plan.bytes_without_offload;
    }
  }
  if (report.bytes_of_even_load > 0) {
    document["expert_room_bytes"] = {{"even", report.bytes_of_even_load},
                                     {"planned", report.fullest().total_bytes},
                                     {"most", report.bytes_of_most_load}};
  }
  document["check"] = {{"seconds", report.seconds}, {"peak_bytes", report.peak_bytes}};
}

}  // namespace troupe
