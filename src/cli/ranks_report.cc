#include "cli/ranks_report.h"

#include <chrono>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "base/machine.h"
#include "base/units.h"
#include "runtime/device_memory.h"
#include "train/model_options.h"

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

// What is small has no column of its own.
uint64_t other_bytes(const RankPlan& plan) {
  return bytes_of(plan, Role::router_state) + bytes_of(plan, Role::input) +
         bytes_of(plan, Role::metric);
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

uint64_t bytes_without_recompute(const RanksReport& report) {
  uint64_t sum = 0;
  for (const RankPlan& plan : report.classes) {
    sum += plan.bytes_without_recompute * static_cast<uint64_t>(plan.ranks);
  }
  return sum;
}

}  // namespace

MemoryOffer offer_memory(Device device, uint64_t needed) {
  MemoryOffer offer{.device = device, .needed = needed};
  if (device == Device::cpu) {
    offer.available = available_memory_bytes();
  } else if (why_no_gpu().empty()) {
    offer.available = available_device_bytes();
  }
  return offer;
}

uint64_t RanksReport::total_bytes() const {
  uint64_t sum = 0;
  for (const RankPlan& plan : classes) sum += plan.total_bytes * static_cast<uint64_t>(plan.ranks);
  return sum;
}

RanksReport check_ranks(const Options& options, const ModelConfig& config, const RunLayout& run) {
  const auto start = std::chrono::steady_clock::now();
  RanksReport report;
  const Device device = device_of(options);
  const DType dtype = compute_dtype_of(options);
  const auto layout = std::make_shared<const RunLayout>(run);
  report.classes = plan_ranks(config, dtype, layout, training_step_options(options, config),
                              threads_per_rank(options), thread_count(options), device);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.peak_bytes = peak_process_bytes();
  const uint64_t needed =
      device == Device::cpu
          ? report.total_bytes()
          : largest_gpu_bytes(report.classes, classify_ranks(config, dtype, layout).class_of_rank,
                              options.ranks_per_gpu);
  report.memory = offer_memory(device, needed);
  return report;
}

std::string make_ranks_text(const RanksReport& report, const Layout& layout) {
  std::string text = "Memory of one rank, by what its program is\n";
  text += fmt::format("  {:>5} {:>5} {:>3} {:>12}{:>12}{:>12}{:>12}{:>12}{:>14}{:>12}{:>12}\n",
                      "ranks", "first", "pp", "parameters", "gradients", "optimizer", "activations",
                      "workspace", "communication", "other", "total");
  for (const RankPlan& plan : report.classes) {
    text += fmt::format("  {:>5} {:>5} {:>3} ", plan.ranks, plan.first_rank,
                        layout.dense_place(plan.first_rank).pp);
    for (const Role role : {Role::parameter, Role::gradient, Role::optimizer, Role::activation,
                            Role::workspace, Role::communication}) {
      text += fmt::format("{:>{}}", format_bytes(bytes_of(plan, role)),
                          role == Role::communication ? 14 : 12);
    }
    text += fmt::format("{:>12}{:>12}\n", format_bytes(other_bytes(plan)),
                        format_bytes(plan.total_bytes));
  }
  text += programs_line(report);
  if (const std::string exchange = text_of(exposure_of(report)); !exchange.empty()) {
    text += "  expert exchange: " + exchange + "\n";
  }
  if (const uint64_t without = bytes_without_recompute(report); without > 0) {
    text += fmt::format("  recompute: {} instead of {} on all ranks\n",
                        format_bytes(report.total_bytes()), format_bytes(without));
  }
  text += fmt::format("  built and checked in {}, with at most {} of memory\n\n",
                      format_duration(report.seconds), format_bytes(report.peak_bytes));
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
                             {"flops_behind", plan.expert_exchange.flops}};
    document["rank_classes"].push_back({{"first_rank", plan.first_rank},
                                        {"ranks", plan.ranks},
                                        {"pp", layout.dense_place(plan.first_rank).pp},
                                        {"bytes", std::move(bytes)},
                                        {"peak_operation", plan.peak_operation},
                                        {"operations", plan.operations},
                                        {"collectives", plan.collectives},
                                        {"messages", plan.messages},
                                        {"operation_flops", plan.operation_flops},
                                        {"expert_exchange", std::move(exchange)}});
    if (plan.bytes_without_recompute == 0) continue;
    document["rank_classes"].back()["bytes_without_recompute"] = plan.bytes_without_recompute;
  }
  document["check"] = {{"seconds", report.seconds}, {"peak_bytes", report.peak_bytes}};
}

}  // namespace troupe
