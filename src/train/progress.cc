#include "train/progress.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <numbers>
#include <optional>
#include <vector>

#include "base/units.h"
#include "options/loss_scaling.h"

namespace troupe {
namespace {

constexpr int64_t kLines = 50;  // of steps that stay on a terminal
constexpr std::chrono::milliseconds kDrawInterval{100};
constexpr size_t kMostCharts = 12;  // layers with a line in the chart
constexpr size_t kMostBlocks = 32;  // of a layer

// Parts of a line, of which the least important ones are left out where the line is too long.
struct Part {
  std::string text;
  int importance;  // 0: never left out
};

std::string join_parts(std::vector<Part> parts, size_t columns) {
  while (true) {
    std::string line;
    for (const Part& part : parts) line += (line.empty() ? "" : " | ") + part.text;
    const auto least =
        std::max_element(parts.begin(), parts.end(),
                         [](const Part& a, const Part& b) { return a.importance < b.importance; });
    if (columns_of(line) <= columns || least->importance == 0) return line;
    parts.erase(least);
  }
}

// Which of the two a processor gives says nothing.
double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::abs(value) : value;
}

}  // namespace

int64_t interval_of_lines(int64_t last_step, int64_t log_interval) {
  const int64_t logged = last_step / log_interval;
  for (int64_t round = 1;; round *= 10) {
    for (const int64_t times : {round, 2 * round, 5 * round}) {
      if (logged / times <= kLines) return times * log_interval;
    }
  }
}

std::string loss_for_comparison(double nats, bool byte_tokens) {
  nats = without_sign_of_nan(nats);
  return byte_tokens ? fmt::format("{:.3f} bits/byte", nats / std::numbers::ln2)
                     : fmt::format("perplexity {:.4g}", std::exp(nats));
}

Progress::Progress(const ProgressOptions& options)
    : options_(options),
      stay_interval_(interval_of_lines(options.last_step, options.log_interval)),
      best_flops_(options.matmul_limit) {}

std::string Progress::describe(const StepMetrics& metrics) {
  // The mean of the first steps, without the very first one, which touches all memory.
  const double smoothing = std::max(0.1, 1.0 / static_cast<double>(std::max<int64_t>(1, steps_)));
  seconds_per_token_ += smoothing * (1.0 / metrics.tokens_per_s - seconds_per_token_);
  ++steps_;
  const double left =
      seconds_per_token_ * static_cast<double>(options_.last_token - metrics.tokens);
  const double flops = metrics.tflops_per_gpu * 1e12;
  best_flops_ = std::max(best_flops_, flops);

  std::vector<Part> parts = {
      {fmt::format("step {:>{}}/{}", metrics.step, std::to_string(options_.last_step).size(),
                   options_.last_step),
       0},
      {fmt::format("loss {:.4f}", without_sign_of_nan(metrics.loss)), 0},
      {loss_for_comparison(metrics.loss, options_.byte_tokens), 6},
      {fmt::format("lr {:.2e}", metrics.lr), 5},
      {fmt::format("grad norm {:.3f}", without_sign_of_nan(metrics.grad_norm)), 4}};
  if (!metrics.layers.empty()) {
    const std::optional<double> ranks = metrics.rank_load_imbalance();
    parts.push_back({fmt::format("imbalance {:.2f}{}", metrics.load_imbalance(),
                                 ranks ? fmt::format(" (ranks {:.2f})", *ranks) : ""),
                     3});
  }
  parts.push_back({fmt::format("{} tokens/s", format_count(metrics.tokens_per_s)), 1});
  parts.push_back({fmt::format("{:.0f}% of limit", 100.0 * flops / best_flops_), 2});
  if (metrics.planned_step_time_s > 0 && metrics.rooms_lacked == 0) {
    parts.push_back(
        {fmt::format("{:.2f}x planned time", metrics.step_time_s / metrics.planned_step_time_s),
         3});
  }
  if (metrics.loss_scale) {
    parts.push_back({"loss scale " + loss_scale_text(*metrics.loss_scale), 6});
  }
  if (metrics.num_zeros) parts.push_back({fmt::format("zeros {}", *metrics.num_zeros), 7});
  if (metrics.params_norm) {
    parts.push_back(
        {fmt::format("params norm {:.3f}", without_sign_of_nan(*metrics.params_norm)), 7});
  }
  if (metrics.rooms_lacked > 0) parts.push_back({"in rounds", 1});
  if (metrics.skipped) {
    const bool is_finite = std::isfinite(metrics.grad_norm);
    parts.push_back(
        {fmt::format("update skipped: gradients {}", is_finite ? "too large" : "not finite"), 0});
  }
  parts.push_back({metrics.step < options_.last_step ? format_time_left(left) : "done", 0});
  return join_parts(std::move(parts), line_.columns());
}

bool Progress::stays(const StepMetrics& metrics, bool logged) const {
  if (!line_.on_terminal()) return logged;
  return metrics.step % stay_interval_ == 0 || metrics.step >= options_.last_step ||
         metrics.skipped;
}

void Progress::step(const StepMetrics& metrics, bool logged) {
  if (options_.quiet) return;
  const std::string text = describe(metrics);
  last_seen_ = metrics.step;
  if (stays(metrics, logged)) return line_.stay(text);
  draw(text);
}

void Progress::draw(const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  if (now - drawn_ < kDrawInterval) return;
  drawn_ = now;
  line_.live(text);
}

void Progress::between_steps(std::string_view what, uint64_t done, uint64_t total,
                             std::string_view unit) {
  if (options_.quiet) return;
  draw(fmt::format("step {:>{}}/{} | {} {}/{} {}", last_seen_,
                   std::to_string(options_.last_step).size(), options_.last_step, what, done, total,
                   unit));
}

void Progress::evaluation(int64_t step, std::span<const EvaluationResult> results) {
  if (options_.quiet) return;
  for (const EvaluationResult& result : results) evaluated(step, "validation", result);
}

void Progress::test(int64_t step, const EvaluationResult& result) {
  if (!options_.quiet) evaluated(step, "test", result);
}

void Progress::evaluated(int64_t step, std::string_view what, const EvaluationResult& result) {
  line(fmt::format("step {:>{}}/{} | {} loss {:.4f} nats per token | {}{}", step,
                   std::to_string(options_.last_step).size(), options_.last_step, what,
                   without_sign_of_nan(result.loss),
                   loss_for_comparison(result.loss, options_.byte_tokens),
                   result.name.empty() ? "" : fmt::format(" on {}", result.name)));
}

void Progress::line(const std::string& text) {
  line_.stay(text);
}

std::string expert_load_chart(const StepMetrics& metrics, size_t columns) {
  if (metrics.layers.empty()) return {};
  std::vector<const RouterMetrics*> shown;
  for (const RouterMetrics& layer : metrics.layers) shown.push_back(&layer);
  std::stable_sort(shown.begin(), shown.end(),
                   [](const auto* a, const auto* b) { return a->imbalance() > b->imbalance(); });
  const RouterMetrics& worst = *shown.front();
  const size_t experts = worst.rows.size();
  std::string text =
      fmt::format("Expert loads of the last step: {} experts in {} layers", experts, shown.size());
  if (shown.size() > kMostCharts) {
    shown.resize(kMostCharts);
    text += fmt::format(", the {} least balanced", kMostCharts);
  }
  text += "\n";
  std::sort(shown.begin(), shown.end(),
            [](const auto* a, const auto* b) { return a->layer < b->layer; });
  const size_t width = std::to_string(shown.back()->layer).size();
  for (const RouterMetrics* layer : shown) {
    const std::string facts =
        fmt::format("  largest/mean {:.2f}{}", layer->imbalance(),
                    layer->dead() > 0 ? fmt::format(", {} without tokens", layer->dead()) : "");
    const std::string name = fmt::format("  layer {:>{}}  ", layer->layer, width);
    const size_t taken = name.size() + facts.size();
    const size_t blocks = std::min(kMostBlocks, columns > taken + 8 ? columns - taken : 8);
    const std::vector<double> rows(layer->rows.begin(), layer->rows.end());
    text += name + block_chart(rows, blocks) + facts + "\n";
  }
  return text + fmt::format("Worst: layer {}, its busiest expert has {:.2f} times the mean load",
                            worst.layer, worst.imbalance());
}

}  // namespace troupe
