#include "report/run_record.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "io/json.h"
#include "options/config_file.h"

namespace troupe {
namespace {

using nlohmann::json;

constexpr int kDeepestLine = 8;
constexpr uint64_t kMostOptionBytes = uint64_t{1} << 20;
constexpr double kNotFinite = std::numeric_limits<double>::quiet_NaN();

// Seconds since 1970 of a time as the log writes it, "2026-11-22T21:40:12.345Z".
std::optional<double> seconds_of(const std::string& time) {
  std::tm parts{};
  double seconds = 0;
  // NOLINTNEXTLINE(cert-err34-c): what does not fit is seen by the number of fields
  if (std::sscanf(time.c_str(), "%4d-%2d-%2dT%2d:%2d:%6lfZ", &parts.tm_year, &parts.tm_mon,
                  &parts.tm_mday, &parts.tm_hour, &parts.tm_min, &seconds) != 6) {
    return std::nullopt;
  }
  parts.tm_year -= 1900;
  parts.tm_mon -= 1;
  return static_cast<double>(timegm(&parts)) + seconds;
}

std::string text_field(const json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_string() ? printable(found->get<std::string>())
                                                   : std::string();
}

double number_field(const json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_number() ? found->get<double>() : kNotFinite;
}

int64_t count_field(const json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// Lines that are left out for one reason.
struct LeftOut {
  int64_t count = 0;
  int64_t first = 0;  // number of the first of them

  void add(int64_t line) {
    if (count++ == 0) first = line;
  }
};

class Reader {
 public:
  explicit Reader(RunRecord& run, std::string path) : run_(run), path_(std::move(path)) {}

  void read();

 private:
  void take(std::string_view text);
  void take_header(const json& line);
  // False: it is not what a line of a step is.
  bool take_step(const json& line, int64_t step);
  bool take_experts(const json& experts, int64_t step);
  void take_evaluation(const json& line, int64_t step);
  void measure_limit_share();
  void note(const LeftOut& lines, const std::string& what);

  RunRecord& run_;
  std::string path_;
  int64_t number_ = 0;  // of the line
  LeftOut unreadable_;
  LeftOut out_of_order_;
  LeftOut other_experts_;
  double start_time_ = kNotFinite;
  double work_before_ = 0;  // seconds, of earlier starts
};

void Reader::read() {
  const MappedFile file = MappedFile::open(path_);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = text.find('\n', begin);
    ++number_;
    if (end == std::string_view::npos) {
      run_.notes.push_back(
          fmt::format("metrics.jsonl: line {}, the last, is cut; it is left out.", number_));
      break;
    }
    take(text.substr(begin, end - begin));
    begin = end + 1;
  }
  note(unreadable_, "not a line of metrics");
  note(out_of_order_, "of a step that is not after the one before");
  note(other_experts_, "with experts that are not those of the steps before");
  measure_limit_share();
}

void Reader::note(const LeftOut& lines, const std::string& what) {
  if (lines.count == 0) return;
  run_.notes.push_back(
      lines.count == 1
          ? fmt::format("metrics.jsonl: line {} is {}; it is left out.", lines.first, what)
          : fmt::format("metrics.jsonl: {} lines are {}, the first of them line "
                        "{}; they are left out.",
                        lines.count, what, lines.first));
}

void Reader::take(std::string_view text) {
  json line;
  try {
    line = parse_json(text, path_, kDeepestLine);
  } catch (const UserError&) {
    return unreadable_.add(number_);
  }
  const bool has_step = line.is_object() && line.contains("step") &&
                        line["step"].is_number_integer() && line["step"].get<int64_t>() >= 0;
  if (!has_step) return unreadable_.add(number_);
  const auto step = line["step"].get<int64_t>();
  if (line.contains("header")) {
    take_header(line);
  } else if (line.contains("loss")) {
    if (!run_.steps.empty() && step <= run_.steps.back()) return out_of_order_.add(number_);
    if (!take_step(line, step)) return unreadable_.add(number_);
  } else if (line.contains("val_loss") || line.contains("test_loss")) {
    take_evaluation(line, step);
  } else {
    return unreadable_.add(number_);
  }
  if (const std::string time = text_field(line, "time"); !time.empty()) run_.last_time = time;
}

void Reader::take_header(const json& line) {
  run_.starts.push_back({.step = count_field(line, "step"),
                         .time = text_field(line, "time"),
                         .host = text_field(line, "host"),
                         .device = text_field(line, "device"),
                         .version = text_field(line, "version"),
                         .commit = text_field(line, "commit"),
                         .model = text_field(line, "model"),
                         .ranks = count_field(line, "ranks"),
                         .parameters = count_field(line, "parameters"),
                         .active_parameters = count_field(line, "active_parameters")});
  const double limit = number_field(line, "matmul_limit_tflops");
  if (limit > 0) run_.starts.back().matmul_limit_tflops = limit;
  start_time_ = seconds_of(run_.starts.back().time).value_or(kNotFinite);
  if (!run_.work_seconds.empty()) work_before_ = run_.work_seconds.back();
}

bool Reader::take_step(const json& line, int64_t step) {
  const json& loss = line["loss"];
  if (!loss.is_number() && !loss.is_null()) return false;
  const auto experts = line.find("experts");
  if (experts != line.end() && !take_experts(*experts, step)) return false;

  run_.steps.push_back(step);
  run_.tokens.push_back(number_field(line, "tokens"));
  const double now = seconds_of(text_field(line, "time")).value_or(kNotFinite);
  // A clock that was set back must not turn the curve.
  const double at_work = work_before_ + std::max(0.0, now - start_time_);
  const double before = run_.work_seconds.empty() ? 0.0 : run_.work_seconds.back();
  run_.work_seconds.push_back(std::isfinite(at_work) ? std::max(before, at_work) : before);
  for (const auto& [name, value] : line.items()) {
    if (name == "step" || name == "time") continue;
    if (!value.is_number() && !value.is_null()) continue;
    RunCurve& curve = run_.curves[printable(name)];
    curve.steps.push_back(step);
    curve.values.push_back(value.is_number() ? value.get<double>() : kNotFinite);
  }
  const auto skipped = line.find("skipped");
  if (skipped != line.end() && *skipped == true) run_.skipped.push_back(step);
  const double lacked = number_field(line, "expert_rooms_lacked");
  if (lacked > 0) {
    run_.overflows.push_back({step, lacked, number_field(line, "expert_room_needed"),
                              number_field(line, "expert_stash_needed")});
  }
  return true;
}

// Their rows, and what all layers have together.
bool Reader::take_experts(const json& experts, int64_t step) {
  if (!experts.is_array()) return false;
  std::vector<LoadHistory::LayerRows> layers;
  double dead = 0;
  double dropped = 0;
  double entropy = 0;
  for (const json& entry : experts) {
    if (!entry.is_object() || !entry.contains("rows") || !entry["rows"].is_array()) return false;
    LoadHistory::LayerRows layer{.layer = static_cast<int32_t>(count_field(entry, "layer")),
                                 .rows = {}};
    for (const json& rows : entry["rows"]) {
      if (!rows.is_number()) return false;
      layer.rows.push_back(rows.get<double>());
    }
    dead += number_field(entry, "dead");
    dropped += number_field(entry, "dropped");
    entropy += number_field(entry, "entropy");
    layers.push_back(std::move(layer));
  }
  if (layers.empty()) return true;
  if (!run_.loads.add(step, layers)) {
    other_experts_.add(number_);
    return true;
  }
  const auto count = static_cast<double>(layers.size());
  const auto add = [&](const char* name, double value) {
    run_.curves[name].steps.push_back(step);
    run_.curves[name].values.push_back(value);
  };
  add("dead_experts", dead);
  add("dropped", dropped / count);
  add("router_entropy", entropy / count);
  return true;
}

void Reader::take_evaluation(const json& line, int64_t step) {
  for (const auto& [name, value] : line.items()) {
    if (!name.starts_with("val_loss") && name != "test_loss") continue;
    RunCurve& curve = run_.evaluations[printable(name)];
    if (!curve.steps.empty() && step <= curve.steps.back()) return out_of_order_.add(number_);
    curve.steps.push_back(step);
    curve.values.push_back(value.is_number() ? value.get<double>() : kNotFinite);
  }
}

// Of the limit that was measured when the run started, or of the best step, as the run says it.
void Reader::measure_limit_share() {
  const auto found = run_.curves.find("tflops_per_gpu");
  double limit = 0;
  for (const StartLine& start : run_.starts) limit = std::max(limit, start.matmul_limit_tflops);
  if (found == run_.curves.end() || limit == 0) return;
  for (const double each : found->second.values) {
    if (std::isfinite(each)) limit = std::max(limit, each);
  }
  RunCurve share = found->second;
  for (double& each : share.values) each /= limit;
  run_.curves["limit_share"] = std::move(share);
}

}  // namespace

RunRecord read_run(const std::string& path) {
  namespace fs = std::filesystem;
  RunRecord run;
  std::error_code error;
  fs::path folder = fs::path(path).lexically_normal();
  if (fs::is_regular_file(folder, error)) folder = folder.parent_path();
  if (!folder.has_filename()) folder = folder.parent_path();
  run.folder = folder.empty() ? "." : folder.string();
  const std::string metrics = join_path(run.folder, "metrics.jsonl");
  if (!fs::exists(metrics, error)) {
    throw_bad_request(fmt::format(
        "{}: no run is there: {}. Give the folder that troupe train names in its first line, or "
        "got as --save.",
        printable(path),
        path_exists(run.folder) ? "the folder has no metrics.jsonl" : "there is no such folder"));
  }
  Reader(run, metrics).read();
  const std::string options = join_path(run.folder, "options.toml");
  if (path_exists(options)) {
    try {
      run.options = option_texts(read_file(options, kMostOptionBytes), options);
    } catch (const UserError& failure) {
      run.notes.push_back(fmt::format("The options are not known: {}", failure.what()));
    }
  } else {
    run.notes.emplace_back("The options are not known: the folder has no options.toml.");
  }
  if (run.steps.empty()) run.notes.emplace_back("No step has been logged.");
  return run;
}

void name_runs(std::vector<RunRecord>& runs) {
  namespace fs = std::filesystem;
  // The last `parts` of an absolute path.
  const auto end_of = [](const RunRecord& run, size_t parts) {
    std::error_code error;
    fs::path path = fs::absolute(run.folder, error).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();  // of "."
    fs::path end;
    for (size_t i = 0; i < parts && path.has_filename(); ++i, path = path.parent_path()) {
      end = end.empty() ? path.filename() : path.filename() / end;
    }
    return printable(end.string());
  };
  constexpr size_t kMostParts = 8;
  for (RunRecord& run : runs) {
    size_t parts = 1;
    const auto is_another = [&](const RunRecord& other) {
      return &other != &run && end_of(other, parts) == end_of(run, parts);
    };
    while (parts < kMostParts && std::any_of(runs.begin(), runs.end(), is_another)) ++parts;
    run.name = end_of(run, parts);
  }
}

}  // namespace troupe
