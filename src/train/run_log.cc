#include "train/run_log.h"

#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>
#include <utility>

#include "base/error.h"
#include "base/machine.h"
#include "data/json_text.h"
#include "io/file.h"
#include "train/terminal.h"

namespace troupe {

RunLog::RunLog(const ReportSpec& spec, bool leads)
    : spec_(spec), leads_(leads), routing_watch_(spec.routing) {}

void RunLog::say(const std::string& text) const {
  if (!is_quiet()) print(text);
}

void RunLog::warn(const std::string& text) const {
  if (leads_) print(text);
}

void RunLog::print(const std::string& text) const {
  if (progress_) return progress_->line(text);
  print_note(text);
}

void RunLog::open(const std::string& folder, RunHeader header, const std::string& options,
                  const ProgressOptions& progress) {
  // A run from the beginning also evaluates step 0 again.
  const int64_t last_kept = header.step > 0 ? header.step : -1;
  if (leads_ && !folder.empty()) {
    const Disk disk;
    disk.make_directories(folder);
    header.options_file = join_path(folder, "options.toml");
    const std::string temporary = header.options_file + ".tmp";
    disk.write_file(temporary, options);
    disk.rename(temporary, header.options_file);
    metrics_ = std::make_unique<MetricsLog>(join_path(folder, "metrics.jsonl"), last_kept,
                                            [this](const std::string& line) { warn(line); });
    header.host = host_name();
    metrics_->header(header);
  }
  if (leads_ && !spec_.tensorboard_folder.empty()) {
    tensorboard_ = std::make_unique<TensorboardWriter>(spec_.tensorboard_folder, last_kept + 1);
  }
  progress_ = std::make_unique<Progress>(progress);
}

void RunLog::step(const StepMetrics& metrics, bool logged) {
  routing_watch_.add(metrics);
  progress_->step(metrics, logged);
  if (!logged || !leads_) return;
  if (metrics_) metrics_->training(metrics);
  for (const std::string& line : routing_watch_.look(metrics.step)) warn(line);
  if (!tensorboard_) return;
  // Megatron's names, where it has one.
  std::vector<TensorboardWriter::Scalar> scalars = {
      {"lm loss", metrics.loss},
      {"learning-rate", metrics.lr},
      {"weight-decay", metrics.weight_decay},
      {"batch-size", static_cast<double>(metrics.batch_size)},
      {"grad-norm", metrics.grad_norm},
      {"tokens", static_cast<double>(metrics.tokens)},
      {"tokens-per-second", metrics.tokens_per_s},
      {"throughput", metrics.tflops_per_gpu},
      {"iteration-time", metrics.step_time_s},
      {"load_imbalance", metrics.load_imbalance()}};
  std::vector<std::string> depths;
  for (size_t i = 0; i < metrics.mtp_losses.size(); ++i) {
    depths.push_back(fmt::format("mtp_{} loss", i + 1));
  }
  for (size_t i = 0; i < depths.size(); ++i) scalars.push_back({depths[i], metrics.mtp_losses[i]});
  for (const RouterMetrics::Loss& loss : metrics.losses()) {
    scalars.push_back({loss.name, loss.value});
  }
  if (spec_.memory_curve) {
    scalars.push_back({"mem-max-allocated-bytes", static_cast<double>(metrics.peak_bytes)});
  }
  if (spec_.timer_curves) {
    scalars.push_back({"batch-generator-time", metrics.data_time_s});
    scalars.push_back(
        {"forward-backward-optimizer-time", metrics.step_time_s - metrics.data_time_s});
  }
  if (metrics.loss_scale) scalars.push_back({"loss-scale", *metrics.loss_scale});
  if (metrics.num_zeros) {
    scalars.push_back({"num-zeros", static_cast<double>(*metrics.num_zeros)});
  }
  if (metrics.params_norm) scalars.push_back({"params-norm", *metrics.params_norm});
  const std::vector<std::pair<std::string, double>> code_shares = metrics.code_shares();
  for (const auto& [name, share] : code_shares) scalars.push_back({name, share});
  write_curves(metrics.step, scalars);
}

void RunLog::watch_gradients(const StepMetrics& metrics) {
  if (!spec_.watch_gradients) return;
  const std::string line = gradient_watch_.look(metrics.step, metrics.grad_norm);
  if (!line.empty()) warn(line);
}

void RunLog::evaluating(uint64_t done, uint64_t total) const {
  progress_->between_steps("validating", done, total, "batches");
}

void RunLog::evaluation(int64_t step, std::vector<EvaluationResult> results, double seconds) {
  if (metrics_) metrics_->evaluation(step, results);
  progress_->evaluation(step, results);
  std::vector<std::string> tags;
  for (const EvaluationResult& result : results) {
    tags.push_back("lm loss validation" + (result.name.empty() ? "" : "/" + result.name));
  }
  std::vector<TensorboardWriter::Scalar> scalars;
  for (size_t i = 0; i < results.size(); ++i) scalars.push_back({tags[i], results[i].loss});
  if (spec_.timer_curves) scalars.push_back({"evaluate-time", seconds});
  write_curves(step, scalars);
  last_evaluation_ = std::move(results);
}

void RunLog::test(int64_t step, const EvaluationResult& result) {
  if (metrics_) metrics_->test(step, result);
  progress_->test(step, result);
  const std::vector<TensorboardWriter::Scalar> scalars = {{"lm loss test", result.loss}};
  write_curves(step, scalars);
  test_loss_ = result.loss;
}

void RunLog::saved(int64_t step, double seconds) {
  if (!spec_.timer_curves) return;
  const std::vector<TensorboardWriter::Scalar> timers = {{"save-checkpoint-time", seconds}};
  write_curves(step, timers);
}

void RunLog::write_curves(int64_t step, std::span<const TensorboardWriter::Scalar> scalars) {
  if (!tensorboard_) return;
  try {
    tensorboard_->write(step, scalars);
  } catch (const UserError& error) {
    warn(fmt::format("Warning: {} Training goes on without --tensorboard-dir.", error.what()));
    tensorboard_.reset();
  }
}

void RunLog::print_json(const RunSummary& summary, const StepMetrics& metrics) const {
  if (!leads_ || !spec_.json) return;
  using nlohmann::ordered_json;
  const bool stepped = metrics.step > 0;  // a finished run that is started again does no step
  const auto of_last_step = [&](double value) {
    return stepped ? ordered_json(value) : ordered_json();
  };
  ordered_json document = {
      {"status", summary.interrupted ? "interrupted" : "done"},
      {"step", summary.step},
      {"last_step", summary.last_step},
      {"tokens", summary.tokens},
      {"parameters", summary.parameters},
      {"active_parameters", summary.active_parameters},
      {"seconds", summary.seconds},
      {"loss", of_last_step(metrics.loss)},
      {"grad_norm", of_last_step(metrics.grad_norm)},
      {"tokens_per_s", of_last_step(metrics.tokens_per_s)},
      {"tflops_per_gpu", of_last_step(metrics.tflops_per_gpu)},
      {"load_imbalance", of_last_step(metrics.load_imbalance())},
      {"peak_bytes", stepped ? ordered_json(metrics.peak_bytes) : ordered_json()},
      {"val_loss",
       last_evaluation_.empty() ? ordered_json() : ordered_json(last_evaluation_.front().loss)}};
  for (const EvaluationResult& result : last_evaluation_) {
    if (!result.name.empty()) document["val_loss/" + result.name] = result.loss;
  }
  if (test_loss_) document["test_loss"] = *test_loss_;
  document["save"] = summary.folder.empty() ? ordered_json() : ordered_json(summary.folder);
  const int64_t saved = summary.saved_step;
  document["saved_step"] = saved < 0 ? ordered_json() : ordered_json(saved);
  fmt::print("{}", printed_json(document));
}

}  // namespace troupe
