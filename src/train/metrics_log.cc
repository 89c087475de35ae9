#include "train/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unistd.h>

#include "base/error.h"
#include "io/file.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxLogBytes = uint64_t{1} << 32;

// The lines of `text` that are complete and of no later step.
std::string keep_lines(const std::string& text, int64_t last_step) {
  std::string kept;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const std::string line = text.substr(begin, end - begin + 1);
    const json entry = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object() && entry.contains("step") && entry["step"].is_number_integer() &&
        entry["step"].get<int64_t>() <= last_step) {
      kept += line;
    }
    begin = end + 1;
  }
  return kept;
}

}  // namespace

double RouterMetrics::imbalance() const {
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (total == 0) return 1.0;
  const auto largest = static_cast<double>(*std::max_element(rows.begin(), rows.end()));
  return largest * static_cast<double>(rows.size()) / static_cast<double>(total);
}

int32_t RouterMetrics::dead() const {
  return static_cast<int32_t>(std::count(rows.begin(), rows.end(), 0));
}

double RouterMetrics::dropped() const {
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  return slots == 0 ? 0.0 : 1.0 - static_cast<double>(total) / static_cast<double>(slots);
}

double StepMetrics::load_imbalance() const {
  double worst = 1.0;
  for (const RouterMetrics& layer : layers) worst = std::max(worst, layer.imbalance());
  return worst;
}

std::vector<RouterMetrics::Loss> StepMetrics::losses() const {
  if (layers.empty()) return {};
  std::vector<RouterMetrics::Loss> means = layers.front().losses;
  for (size_t i = 0; i < means.size(); ++i) {
    double sum = 0;
    for (const RouterMetrics& layer : layers) sum += layer.losses[i].value;
    means[i].value = sum / static_cast<double>(layers.size());
  }
  return means;
}

MetricsLog::MetricsLog(const std::string& path, int64_t last_step) : path_(path) {
  if (path_exists(path)) {
    const std::string text = read_file(path, kMaxLogBytes);
    const std::string kept = keep_lines(text, last_step);
    if (kept != text) {
      const Disk disk;
      const std::string temporary = path + ".tmp";
      disk.write_file(temporary, kept);
      disk.rename(temporary, path);
      disk.sync_directory(parent_path(path));
    }
  }
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) throw_failed("Cannot open " + path + ": " + std::strerror(errno) + ".");
}

MetricsLog::~MetricsLog() {
  close(descriptor_);
}

void MetricsLog::append(const std::string& line) {
  size_t written = 0;
  while (written < line.size()) {
    const ssize_t count = write(descriptor_, line.data() + written, line.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_failed("Cannot write " + path_ + ": " + std::strerror(errno) + ".");
    written += static_cast<size_t>(count);
  }
}

void MetricsLog::training(const StepMetrics& metrics) {
  nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"lr", metrics.lr},
      {"grad_norm", metrics.grad_norm},
      {"tokens", metrics.tokens},
      {"batch_size", metrics.batch_size},
      {"weight_decay", metrics.weight_decay},
      {"tokens_per_s", metrics.tokens_per_s},
      {"tflops_per_gpu", metrics.tflops_per_gpu},
      {"step_time_s", metrics.step_time_s},
      {"peak_bytes", metrics.peak_bytes},
      {"load_imbalance", metrics.load_imbalance()},
  };
  for (const RouterMetrics::Loss& loss : metrics.losses()) {
    line[std::string(loss.name)] = loss.value;
  }
  if (metrics.skipped) line["skipped"] = true;
  for (const RouterMetrics& layer : metrics.layers) {
    nlohmann::ordered_json entry = {{"layer", layer.layer},
                                    {"imbalance", layer.imbalance()},
                                    {"max_violation", layer.imbalance() - 1},
                                    {"dead", layer.dead()},
                                    {"dropped", layer.dropped()},
                                    {"entropy", layer.entropy},
                                    {"rows", layer.rows}};
    for (const RouterMetrics::Loss& loss : layer.losses) entry[std::string(loss.name)] = loss.value;
    line["experts"].push_back(std::move(entry));
  }
  append(line.dump() + "\n");
}

void MetricsLog::evaluation(int64_t step, std::span<const EvaluationResult> results) {
  nlohmann::ordered_json line = {
      {"step", step}, {"val_loss", results.front().loss}, {"val_tokens", results.front().tokens}};
  for (const EvaluationResult& result : results) {
    if (result.name.empty()) continue;
    line["val_loss/" + result.name] = result.loss;
    line["val_tokens/" + result.name] = result.tokens;
  }
  // A data set's path need not be valid UTF-8, JSON must be.
  append(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace troupe
