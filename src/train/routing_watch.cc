#include "train/routing_watch.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

namespace troupe {
namespace {

// A factor that would have sufficed is said again when it is so much larger than the last one.
constexpr double kNewsworthy = 1.25;

}  // namespace

std::string sufficient_room(double room, double stash) {
  std::vector<std::string> flags;
  const auto add = [&](const char* flag, double factor) {
    if (factor > 0)
      flags.push_back(fmt::format("--{} {:.2f}", flag, std::ceil(100 * factor) / 100));
  };
  add("moe-expert-rank-capacity-factor", room);
  add("moe-paged-stash-buffer-size-factor-cuda", stash);
  return fmt::format("{}", fmt::join(flags, " and "));
}

void RoutingWatch::add(const StepMetrics& metrics) {
  ++steps_;
  if (metrics.rooms_lacked > 0) {
    ++steps_without_room_;
    room_needed_ = std::max(room_needed_, metrics.room_needed);
    stash_needed_ = std::max(stash_needed_, metrics.stash_needed);
  }
  layers_.resize(metrics.layers.size());
  for (size_t i = 0; i < layers_.size(); ++i) {
    const RouterMetrics& router = metrics.layers[i];
    Layer& layer = layers_[i];
    layer.layer = router.layer;
    layer.rows.resize(router.rows.size());
    for (size_t e = 0; e < router.rows.size(); ++e) layer.rows[e] += router.rows[e];
    layer.entropy += router.entropy;
    layer.steps += 1;
  }
}

std::string RoutingWatch::look_at_rooms(int64_t step) {
  if (100 * steps_without_room_ <= steps_ || (room_needed_ <= kNewsworthy * room_reported_ &&
                                              stash_needed_ <= kNewsworthy * stash_reported_)) {
    return {};
  }
  room_reported_ = room_needed_;
  stash_reported_ = stash_needed_;
  return fmt::format(
      "Warning: step {}: {} of {} steps ran a second time, in rounds, because experts had too "
      "little room. {} would have sufficed for all.",
      step, steps_without_room_, steps_, sufficient_room(room_needed_, stash_needed_));
}

std::vector<std::string> RoutingWatch::look(int64_t step) {
  std::vector<std::string> lines;
  if (const std::string line = look_at_rooms(step); !line.empty()) lines.push_back(line);
  const auto judge = [&](bool crossed, bool& reported, const std::string& finding,
                         const std::string& advice) {
    if (crossed && !reported) lines.push_back("Warning: " + finding + advice);
    if (!crossed && reported) lines.push_back("Back within the threshold: " + finding);
    reported = crossed;
  };
  for (Layer& layer : layers_) {
    if (layer.steps == 0) continue;
    RouterMetrics sums;
    sums.rows = layer.rows;
    const auto experts = static_cast<double>(layer.rows.size());
    const double imbalance = sums.imbalance();
    const double dead = static_cast<double>(sums.dead()) / experts;
    const double largest = std::log(experts);
    const double entropy = layer.entropy / static_cast<double>(layer.steps);
    const std::string where = fmt::format("step {}, layer {}: ", step, layer.layer);
    judge(thresholds_.load_imbalance > 0 && imbalance > thresholds_.load_imbalance,
          layer.unbalanced,
          where + fmt::format("the busiest expert gets {:.2f} times the mean load (threshold "
                              "{:g}: --warn-load-imbalance).",
                              imbalance, thresholds_.load_imbalance),
          " A larger --moe-aux-loss-coeff or --moe-router-enable-expert-bias balances more.");
    judge(thresholds_.dead_experts > 0 && dead > thresholds_.dead_experts, layer.dead,
          where + fmt::format("{} of {} experts get no tokens (threshold {:.0f}%: "
                              "--warn-dead-experts).",
                              sums.dead(), layer.rows.size(), 100 * thresholds_.dead_experts),
          "");
    judge(thresholds_.router_entropy > 0 && experts > 1 &&
              entropy < thresholds_.router_entropy * largest,
          layer.collapsed,
          where + fmt::format("the router's entropy is {:.3f} nats of at most {:.3f} (threshold "
                              "{:.0f}%: --warn-router-entropy).",
                              entropy, largest, 100 * thresholds_.router_entropy),
          " It hardly looks at most experts; --moe-z-loss-coeff keeps logits small.");
    layer.rows.assign(layer.rows.size(), 0);
    layer.entropy = 0;
    layer.steps = 0;
  }
  return lines;
}

}  // namespace troupe
