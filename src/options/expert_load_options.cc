#include "options/expert_load_options.h"

#include <deque>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "io/json.h"
#include "options/read_number.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

namespace fs = std::filesystem;

using nlohmann::json;

constexpr std::string_view kEven = "even";
constexpr std::string_view kDirichlet = "dirichlet:";
constexpr double kLeastAlpha = 1e-3;
constexpr double kMostAlpha = 1e6;
constexpr size_t kSteps = 100;  // of a run, the last ones
constexpr int kDeepestLine = 8;
constexpr int64_t kMostLayers = 1'000'000;
constexpr double kMostRows = 1e15;

[[noreturn]] void refuse(const Options& options, const std::string& why) {
  throw_bad_request(fmt::format("--expert-load {}: {}", printable(options.expert_load), why));
}

// Nothing where the loads are not drawn.
std::optional<double> alpha_of(const Options& options) {
  const std::string_view text = options.expert_load;
  if (!text.starts_with(kDirichlet)) return std::nullopt;
  const std::optional<double> alpha = read_number<double>(text.substr(kDirichlet.size()));
  if (!alpha || !(*alpha >= kLeastAlpha && *alpha <= kMostAlpha)) {
    refuse(options, fmt::format("ALPHA is a number from {} to {:.0f}, as in dirichlet:1.",
                                kLeastAlpha, kMostAlpha));
  }
  return alpha;
}

std::string metrics_path_of(const Options& options) {
  std::error_code error;
  const std::string& path = options.expert_load;
  if (fs::is_regular_file(path, error)) return path;
  std::string metrics = join_path(path, "metrics.jsonl");
  if (fs::is_regular_file(metrics, error)) return metrics;
  refuse(options, fmt::format("{}. It takes even, dirichlet:ALPHA, or the folder of a run, or its "
                              "metrics.jsonl.",
                              path_exists(path) ? "the folder has no metrics.jsonl"
                                                : "there is no such run"));
}

struct Line {
  int64_t number = 0;
  std::string_view text;
};

// The last lines of steps that say what the experts got. A line that is being written is left out.
std::deque<Line> last_steps(std::string_view text) {
  std::deque<Line> lines;
  int64_t number = 0;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string_view::npos;
       begin = end + 1) {
    ++number;
    const std::string_view line = text.substr(begin, end - begin);
    if (line.find("\"experts\":") == std::string_view::npos) continue;
    lines.push_back({number, line});
    if (lines.size() > kSteps) lines.pop_front();
  }
  return lines;
}

// Rows of the layers of a line's step; nothing where it does not say what it should.
std::optional<std::vector<ExpertLoad::LayerRows>> rows_of(const json& line) {
  std::vector<ExpertLoad::LayerRows> layers;
  if (!line.is_object() || !line.contains("experts") || !line["experts"].is_array()) return {};
  for (const json& entry : line["experts"]) {
    if (!entry.is_object() || !entry.contains("layer") || !entry.contains("rows")) return {};
    if (!entry["layer"].is_number_integer() || !entry["rows"].is_array()) return {};
    const auto number = entry["layer"].get<int64_t>();
    if (number < 0 || number > kMostLayers) return {};
    ExpertLoad::LayerRows layer{.layer = static_cast<int32_t>(number), .rows = {}};
    for (const json& each : entry["rows"]) {
      const double rows = each.is_number() ? each.get<double>() : -1;
      if (!(rows >= 0 && rows <= kMostRows)) return {};
      layer.rows.push_back(rows);
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

bool has_rows(const std::vector<ExpertLoad::LayerRows>& layers) {
  for (const ExpertLoad::LayerRows& layer : layers) {
    for (const double rows : layer.rows) {
      if (rows > 0) return true;
    }
  }
  return false;
}

ExpertLoad measured_load(const Options& options, int32_t experts) {
  const std::string path = metrics_path_of(options);
  const MappedFile file = MappedFile::open(path);
  std::vector<std::vector<ExpertLoad::LayerRows>> steps;
  for (const auto& [number, text] :
       last_steps({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()})) {
    const auto layers = rows_of(parse_json(text, fmt::format("{}:{}", path, number), kDeepestLine));
    if (!layers) {
      refuse(options, fmt::format("line {} does not say what rows the experts got (docs/"
                                  "run_folder.md).",
                                  number));
    }
    for (const ExpertLoad::LayerRows& layer : *layers) {
      if (layer.rows.size() == static_cast<size_t>(experts)) continue;
      refuse(options, fmt::format("the run had {} experts in a layer, the model has {}. Take a run "
                                  "with as many, or dirichlet:ALPHA.",
                                  layer.rows.size(), experts));
    }
    if (has_rows(*layers)) steps.push_back(*layers);
  }
  if (steps.empty()) {
    refuse(options,
           "no line of a step says what rows the experts got. Take a run of a model with "
           "experts that has logged a step, or dirichlet:ALPHA.");
  }
  return ExpertLoad::measured(steps, options.moe_expert_clones);
}

}  // namespace

void check_expert_load(const Options& options) {
  if (options.expert_load == kEven) return;
  refuse_without(options.gpus.empty(), "expert-load", "gpus");
  if (!alpha_of(options)) metrics_path_of(options);
}

ExpertLoad expert_load_of(const Options& options, const ModelConfig& config) {
  if (options.expert_load == kEven) return {};
  if (config.num_experts == 0) {
    refuse(options, "the model has no experts. Leave --expert-load out.");
  }
  if (const std::optional<double> alpha = alpha_of(options)) {
    return ExpertLoad::dirichlet(*alpha, config.num_experts, config.moe_router_topk,
                                 options.moe_expert_clones);
  }
  return measured_load(options, config.num_experts);
}

}  // namespace troupe
