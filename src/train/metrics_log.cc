#include "train/metrics_log.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unistd.h>
#include <utility>

#include "base/commit.h"
#include "base/error.h"
#include "io/file.h"
#include "model/forward_pass.h"
#include "options/options.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxLogBytes = uint64_t{1} << 32;
// Of lines that wait for room on the disk.
constexpr size_t kMostPending = size_t{64} << 20;

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

double imbalance_of(const std::vector<int64_t>& rows) {
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  if (total == 0) return 1.0;
  const auto largest = static_cast<double>(*std::max_element(rows.begin(), rows.end()));
  return largest * static_cast<double>(rows.size()) / static_cast<double>(total);
}

}  // namespace

double RouterMetrics::imbalance() const {
  return imbalance_of(rows);
}

double RouterMetrics::rank_imbalance() const {
  return imbalance_of(rank_rows);
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

std::optional<double> StepMetrics::rank_load_imbalance() const {
  std::optional<double> worst;
  for (const RouterMetrics& layer : layers) {
    if (layer.rank_rows.empty()) continue;
    worst = std::max(worst.value_or(1), layer.rank_imbalance());
  }
  return worst;
}

std::vector<RouterMetrics::Loss> StepMetrics::losses() const {
  std::vector<RouterMetrics::Loss> means;
  if (!layers.empty()) means = layers.front().losses;
  for (size_t i = 0; i < means.size(); ++i) {
    double sum = 0;
    for (const RouterMetrics& layer : layers) sum += layer.losses[i].value;
    means[i].value = sum / static_cast<double>(layers.size());
  }
  if (indexers.empty()) return means;
  double sum = 0;
  for (const IndexerLoss& indexer : indexers) sum += indexer.value;
  means.push_back(
      {name_of(AuxiliaryLossKind::indexer), sum / static_cast<double>(indexers.size())});
  return means;
}

std::vector<std::pair<std::string, double>> StepMetrics::code_shares() const {
  std::vector<std::pair<std::string, double>> largest;
  for (size_t i = 0; i < kOperandNames.size(); ++i) {
    std::optional<CodeShare> worst;
    for (const CodeShares& map : codes) {
      if (!map.operands[i]) continue;
      if (!worst) worst.emplace();
      worst->saturated = std::max(worst->saturated, map.operands[i]->saturated);
      worst->zero = std::max(worst->zero, map.operands[i]->zero);
    }
    if (!worst) continue;
    largest.emplace_back(fmt::format("fp8_{}_saturated", kOperandNames[i]), worst->saturated);
    largest.emplace_back(fmt::format("fp8_{}_zero", kOperandNames[i]), worst->zero);
  }
  return largest;
}

std::string utc_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const auto seconds = static_cast<time_t>(milliseconds / 1000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     milliseconds % 1000);
}

MetricsLog::MetricsLog(const std::string& path, int64_t last_step, Warn warn)
    : path_(path), warn_(std::move(warn)) {
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
  write_pending();
  close(descriptor_);
}

std::string MetricsLog::write_pending() {
  size_t written = 0;
  std::string reason;
  while (written < pending_.size() && reason.empty()) {
    const ssize_t count = write(descriptor_, pending_.data() + written, pending_.size() - written);
    if (count >= 0) {
      written += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      reason = std::strerror(errno);
    }
  }
  pending_.erase(0, written);
  return reason;
}

void MetricsLog::append(const std::string& line) {
  if (pending_.size() + line.size() <= kMostPending) {
    pending_ += line;
  } else {
    ++lost_lines_;
  }
  const std::string reason = write_pending();
  const bool fails = !reason.empty();
  if (fails == has_failed_) return;
  has_failed_ = fails;
  if (!warn_) return;
  if (fails) {
    warn_(
        fmt::format("Warning: {} cannot be written: {}. Training goes on; its lines are kept in "
                    "memory until they can be.",
                    path_, reason));
  } else {
    warn_(fmt::format(
        "{} is written again{}.", path_,
        lost_lines_ > 0 ? fmt::format("; {} lines are lost", lost_lines_) : ", without a gap"));
    lost_lines_ = 0;
  }
}

void MetricsLog::header(const RunHeader& header) {
  const nlohmann::ordered_json line = {
      {"header", true},
      {"step", header.step},
      {"time", utc_time()},
      {"version", kVersion},
      {"commit", build_commit()},
      {"host", header.host},
      {"device", header.device},
      {"ranks", header.ranks},
      {"model", header.model},
      {"parameters", header.parameters},
      {"active_parameters", header.active_parameters},
      {"data", header.data},
      {"options", header.options_file},
      {"matmul_limit_tflops", header.matmul_limit_tflops},
  };
  // A path need not be valid UTF-8, JSON must be.
  append(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void MetricsLog::training(const StepMetrics& metrics) {
  nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"time", utc_time()},
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
  if (const auto ranks = metrics.rank_load_imbalance()) line["rank_load_imbalance"] = *ranks;
  if (metrics.planned_step_time_s > 0) line["planned_step_time_s"] = metrics.planned_step_time_s;
  for (size_t i = 0; i < metrics.mtp_losses.size(); ++i) {
    line[fmt::format("mtp_{}_loss", i + 1)] = metrics.mtp_losses[i];
  }
  for (const RouterMetrics::Loss& loss : metrics.losses()) {
    line[std::string(loss.name)] = loss.value;
  }
  if (metrics.skipped) line["skipped"] = true;
  if (metrics.rooms_lacked > 0) {
    line["expert_rooms_lacked"] = metrics.rooms_lacked;
    if (metrics.room_needed > 0) line["expert_room_needed"] = metrics.room_needed;
    if (metrics.stash_needed > 0) line["expert_stash_needed"] = metrics.stash_needed;
  }
  if (metrics.loss_scale) line["loss_scale"] = *metrics.loss_scale;
  if (metrics.num_zeros) line["num_zeros"] = *metrics.num_zeros;
  if (metrics.params_norm) line["params_norm"] = *metrics.params_norm;
  for (const RouterMetrics& layer : metrics.layers) {
    nlohmann::ordered_json entry = {{"layer", layer.layer},
                                    {"imbalance", layer.imbalance()},
                                    {"max_violation", layer.imbalance() - 1},
                                    {"dead", layer.dead()},
                                    {"dropped", layer.dropped()},
                                    {"entropy", layer.entropy},
                                    {"rows", layer.rows}};
    if (!layer.rank_rows.empty()) {
      entry["rank_imbalance"] = layer.rank_imbalance();
      entry["rank_rows"] = layer.rank_rows;
    }
    for (const RouterMetrics::Loss& loss : layer.losses) entry[std::string(loss.name)] = loss.value;
    line["experts"].push_back(std::move(entry));
  }
  for (const StepMetrics::IndexerLoss& indexer : metrics.indexers) {
    line["indexers"].push_back(
        {{"layer", indexer.layer}, {name_of(AuxiliaryLossKind::indexer), indexer.value}});
  }
  for (const auto& [name, share] : metrics.code_shares()) line[name] = share;
  for (const CodeShares& map : metrics.codes) {
    nlohmann::ordered_json entry = {{"layer", map.layer}, {"map", map.map}};
    for (size_t i = 0; i < kOperandNames.size(); ++i) {
      if (const auto& operand = map.operands[i]) {
        entry[std::string(kOperandNames[i])] = {{"saturated", operand->saturated},
                                                {"zero", operand->zero}};
      }
    }
    line["fp8"].push_back(std::move(entry));
  }
  append(line.dump() + "\n");
}

void MetricsLog::evaluation(int64_t step, std::span<const EvaluationResult> results) {
  nlohmann::ordered_json line = {{"step", step},
                                 {"time", utc_time()},
                                 {"val_loss", results.front().loss},
                                 {"val_tokens", results.front().tokens}};
  for (const EvaluationResult& result : results) {
    if (result.name.empty()) continue;
    line["val_loss/" + result.name] = result.loss;
    line["val_tokens/" + result.name] = result.tokens;
  }
  // A data set's path need not be valid UTF-8, JSON must be.
  append(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void MetricsLog::test(int64_t step, const EvaluationResult& result) {
  const nlohmann::ordered_json line = {{"step", step},
                                       {"time", utc_time()},
                                       {"test_loss", result.loss},
                                       {"test_tokens", result.tokens}};
  append(line.dump() + "\n");
}

}  // namespace troupe
