#include "train/progress.h"

#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <unistd.h>

#include "base/units.h"

namespace troupe {

Progress::Progress(int64_t last_step, int64_t last_token, double matmul_limit, bool quiet)
    : last_step_(last_step),
      last_token_(last_token),
      matmul_limit_(matmul_limit),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) != 0) {}

void Progress::print_line(const std::string& text, bool stays) {
  const char* clear = terminal_ && line_open_ ? "\r\x1b[K" : "";
  const bool newline = stays || !terminal_;
  std::fprintf(stderr, "%s%s%s", clear, text.c_str(), newline ? "\n" : "");
  std::fflush(stderr);
  line_open_ = !newline;
}

void Progress::step(const StepMetrics& metrics) {
  if (quiet_) return;
  constexpr double kSmoothing = 0.1;
  const double now = 1.0 / metrics.tokens_per_s;
  seconds_per_token_ =
      seconds_per_token_ == 0 ? now : seconds_per_token_ + kSmoothing * (now - seconds_per_token_);
  const double left = seconds_per_token_ * static_cast<double>(last_token_ - metrics.tokens);
  std::string text = fmt::format(
      "step {:>{}}/{} | loss {:.4f} nats | lr {:.2e} | {} tokens/s | {:.0f}% of matmul limit | "
      "grad norm {:.3f}",
      metrics.step, std::to_string(last_step_).size(), last_step_, metrics.loss, metrics.lr,
      format_count(metrics.tokens_per_s), 100.0 * metrics.tflops_per_gpu * 1e12 / matmul_limit_,
      metrics.grad_norm);
  if (!metrics.layers.empty()) text += fmt::format(" | imbalance {:.2f}", metrics.load_imbalance());
  if (metrics.skipped) text += " | update skipped: gradients not finite";
  text += metrics.step < last_step_ ? fmt::format(" | {} left", format_duration(left)) : " | done";
  print_line(text, metrics.step >= last_step_ || metrics.skipped);
}

void Progress::evaluation(int64_t step, std::span<const EvaluationResult> results) {
  for (const EvaluationResult& result : results) {
    note(fmt::format("step {:>{}}/{} | validation loss {:.4f} nats per token{}", step,
                     std::to_string(last_step_).size(), last_step_, result.loss,
                     result.name.empty() ? "" : fmt::format(" on {}", result.name)));
  }
}

void Progress::note(const std::string& text) {
  if (!quiet_) print_line(text, /*stays=*/true);
}

void Progress::warning(const std::string& text) {
  print_line(text, /*stays=*/true);
}

std::string expert_load_chart(const StepMetrics& metrics, int width) {
  std::string text;
  for (const RouterMetrics& layer : metrics.layers) {
    int64_t total = 0;
    int64_t largest = 1;
    for (const int64_t rows : layer.rows) {
      total += rows;
      largest = std::max(largest, rows);
    }
    text += fmt::format("layer {}: largest/mean {:.2f}, {} without tokens\n", layer.layer,
                        layer.imbalance(), layer.dead());
    for (size_t expert = 0; expert < layer.rows.size(); ++expert) {
      const int64_t rows = layer.rows[expert];
      const auto bars = static_cast<int>((rows * width + largest / 2) / largest);
      std::string bar;
      for (int i = 0; i < bars; ++i) bar += "█";
      text += fmt::format(
          "  expert {:>3} {:>6.2f}% {}\n", expert,
          total > 0 ? 100.0 * static_cast<double>(rows) / static_cast<double>(total) : 0.0, bar);
    }
  }
  return text;
}

}  // namespace troupe
