#include "train/step_time_watch.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "base/units.h"

namespace troupe {
namespace {

constexpr size_t kNamed = 4;           // kinds of operations
constexpr double kWorthNaming = 0.02;  // of the planned time

// What takes more time than planned, the largest excess first.
std::string describe_excess(const PlannedTime& planned, const SeenStep& seen) {
  std::vector<std::pair<double, std::string>> parts;
  const auto add = [&](double excess, std::string text) {
    if (excess > kWorthNaming * planned.seconds) parts.emplace_back(excess, std::move(text));
  };
  for (const KindTime& kind : seen.kinds) {
    const auto found = planned.of_kinds.find(kind.kind);
    const double expected = found != planned.of_kinds.end() ? found->second : 0;
    add(kind.seconds - expected,
        fmt::format("{} {} instead of {}", kind.kind, format_duration(kind.seconds),
                    format_duration(expected)));
  }
  const double idle = seen.times.seconds - seen.times.busy_s;
  add(idle, fmt::format("between operations {}", format_duration(idle)));
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (parts.empty()) return "no kind of operation stands out";
  std::string text;
  for (size_t i = 0; i < std::min(kNamed, parts.size()); ++i) {
    text += (i == 0 ? "" : ", ") + parts[i].second;
  }
  return text;
}

}  // namespace

void StepTimeWatch::add(const StepMetrics& metrics) {
  if (metrics.planned_step_time_s == 0 || metrics.rooms_lacked > 0) return;
  if (metrics.planned_step_time_s != planned_) {
    planned_ = metrics.planned_step_time_s;
    steps_ = 0;
    seconds_.clear();
  }
  if (++steps_ <= kFirst) return;
  if (seconds_.size() == kSteps) seconds_.erase(seconds_.begin());
  seconds_.push_back(metrics.step_time_s);
}

bool StepTimeWatch::is_slow() const {
  return !has_said_ && seconds_.size() == kSteps && seconds() > kFactor * planned_;
}

double StepTimeWatch::seconds() const {
  std::vector<double> sorted = seconds_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::string describe_slow_steps(int64_t step, double seconds, const PlannedTime& planned,
                                const std::optional<SeenStep>& seen) {
  std::string text = fmt::format(
      "Warning: step {}: the last {} steps took {} each (median), {:.0f} % more than the {} "
      "planned for {}.",
      step, StepTimeWatch::kSteps, format_duration(seconds), 100 * (seconds / planned.seconds - 1),
      format_duration(planned.seconds), planned.hardware);
  if (!seen) return text + " --profile shows which operations take longer.";
  return text + fmt::format(" On rank 0: {}.", describe_excess(planned, *seen));
}

}  // namespace troupe
