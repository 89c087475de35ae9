#include "report/run_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "base/units.h"
#include "options/options.h"
#include "train/routing_watch.h"
#include "train/terminal.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

// What a page holds of a curve: four points for each column of pixels of a wide chart.
constexpr size_t kMostPoints = 2000;
constexpr size_t kMostAxisPoints = 300;
constexpr size_t kMostListed = 100;  // steps that are named one by one
constexpr size_t kLongestValue = 400;

// Lines of metrics that stand in an axis, in a table or nowhere.
constexpr auto kNotDrawn = std::to_array<std::string_view>(
    {"tokens", "batch_size", "weight_decay", "step_time_s", "planned_step_time_s",
     "expert_rooms_lacked", "expert_room_needed", "expert_stash_needed"});

// Options that say where a run is, not what it is.
constexpr auto kPlaces = std::to_array<std::string_view>({"save", "profile-dir"});

ordered_json number_or_null(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

ordered_json curve_json(const RunCurve& curve) {
  return {{"steps", curve.steps}, {"values", curve.values}};
}

struct Extreme {
  int64_t step = 0;
  double value = 0;
};

// Of the finite values; none: there are none.
template <class IsBetter>
std::optional<Extreme> best_of(const RunCurve& curve, IsBetter is_better) {
  std::optional<Extreme> best;
  for (size_t i = 0; i < curve.values.size(); ++i) {
    if (!std::isfinite(curve.values[i])) continue;
    if (!best || is_better(curve.values[i], best->value)) {
      best = Extreme{curve.steps[i], curve.values[i]};
    }
  }
  return best;
}

std::optional<Extreme> lowest(const RunCurve& curve) {
  return best_of(curve, [](double a, double b) { return a < b; });
}
std::optional<Extreme> highest(const RunCurve& curve) {
  return best_of(curve, [](double a, double b) { return a > b; });
}
std::optional<Extreme> last(const RunCurve& curve) {
  return best_of(curve, [](double, double) { return true; });
}
std::optional<Extreme> first(const RunCurve& curve) {
  return best_of(curve, [](double, double) { return false; });
}

std::optional<double> median(const RunCurve& curve) {
  std::vector<double> values;
  std::copy_if(curve.values.begin(), curve.values.end(), std::back_inserter(values),
               [](double value) { return std::isfinite(value); });
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

ordered_json json_of(const std::optional<Extreme>& extreme) {
  if (!extreme) return {};
  return {{"step", extreme->step}, {"value", extreme->value}};
}

const RunCurve& curve_of(const RunRecord& run, std::string_view name) {
  static const RunCurve kNone;
  const auto found = run.curves.find(name);
  return found == run.curves.end() ? kNone : found->second;
}

ordered_json axes_json(const RunRecord& run) {
  ordered_json axes = {{"steps", ordered_json::array()},
                       {"tokens", ordered_json::array()},
                       {"seconds", ordered_json::array()}};
  const size_t count = run.steps.size();
  const size_t points = std::min(count, kMostAxisPoints);
  for (size_t i = 0; i < points; ++i) {
    const size_t at = points == 1 ? 0 : i * (count - 1) / (points - 1);
    axes["steps"].push_back(run.steps[at]);
    axes["tokens"].push_back(number_or_null(run.tokens[at]));
    axes["seconds"].push_back(run.work_seconds[at]);
  }
  return axes;
}

// By layer, then stretch, then expert: rows in hundredths of the mean of the layer's experts.
ordered_json loads_json(const LoadHistory& loads) {
  ordered_json layers = ordered_json::array();
  const auto& stretches = loads.stretches();
  const size_t count = stretches.empty() ? 0 : stretches.front().size();
  for (size_t i = 0; i < count; ++i) {
    ordered_json columns = ordered_json::array();
    for (const auto& stretch : stretches) {
      double sum = 0;
      for (const double rows : stretch[i].rows) sum += rows;
      const double mean = sum / static_cast<double>(std::max<size_t>(1, stretch[i].rows.size()));
      ordered_json column = ordered_json::array();
      for (const double rows : stretch[i].rows) {
        column.push_back(std::isfinite(rows / mean) ? std::llround(100 * rows / mean) : 0);
      }
      columns.push_back(std::move(column));
    }
    layers.push_back({{"layer", stretches.front()[i].layer}, {"percent_of_mean", columns}});
  }
  return {{"first_steps", loads.first_steps()}, {"layers", std::move(layers)}};
}

ordered_json starts_json(const RunRecord& run) {
  ordered_json starts = ordered_json::array();
  for (const StartLine& start : run.starts) {
    starts.push_back({{"step", start.step},
                      {"time", start.time},
                      {"host", start.host},
                      {"device", start.device},
                      {"ranks", start.ranks},
                      {"version", start.version},
                      {"commit", start.commit},
                      {"matmul_limit_tflops", number_or_null(start.matmul_limit_tflops)}});
  }
  return starts;
}

// The largest factors that would have sufficed, of a layer's room and of the stash; 0: there was
// enough.
std::pair<double, double> needed_by(const std::vector<RoomOverflow>& overflows) {
  std::pair<double, double> needed = {0, 0};
  for (const RoomOverflow& each : overflows) {
    if (each.room_needed > needed.first) needed.first = each.room_needed;
    if (each.stash_needed > needed.second) needed.second = each.stash_needed;
  }
  return needed;
}

ordered_json summary_json(const RunRecord& run) {
  const auto optional_json = [](const std::optional<double>& value) {
    return value ? ordered_json(*value) : ordered_json();
  };
  const RunCurve& loss = curve_of(run, "loss");
  ordered_json evaluations = ordered_json::object();
  for (const auto& [name, curve] : run.evaluations) {
    evaluations[name] = {{"last", json_of(last(curve))}, {"lowest", json_of(lowest(curve))}};
  }
  const auto [room_needed, stash_needed] = needed_by(run.overflows);
  return {{"loss",
           {{"first", json_of(first(loss))},
            {"last", json_of(last(loss))},
            {"lowest", json_of(lowest(loss))}}},
          {"evaluations", std::move(evaluations)},
          {"grad_norm",
           {{"median", optional_json(median(curve_of(run, "grad_norm")))},
            {"highest", json_of(highest(curve_of(run, "grad_norm")))}}},
          {"step_time_s", optional_json(median(curve_of(run, "step_time_s")))},
          {"planned_step_time_s", json_of(last(curve_of(run, "planned_step_time_s")))},
          {"tokens_per_s", optional_json(median(curve_of(run, "tokens_per_s")))},
          {"tflops_per_gpu", optional_json(median(curve_of(run, "tflops_per_gpu")))},
          {"limit_share", optional_json(median(curve_of(run, "limit_share")))},
          {"peak_bytes", json_of(highest(curve_of(run, "peak_bytes")))},
          {"load_imbalance",
           {{"last", json_of(last(curve_of(run, "load_imbalance")))},
            {"highest", json_of(highest(curve_of(run, "load_imbalance")))}}},
          {"dead_experts",
           {{"last", json_of(last(curve_of(run, "dead_experts")))},
            {"highest", json_of(highest(curve_of(run, "dead_experts")))}}},
          {"dropped", json_of(highest(curve_of(run, "dropped")))},
          {"skipped_steps", run.skipped.size()},
          {"overflowing_steps", run.overflows.size()},
          {"room_needed", room_needed > 0 ? ordered_json(room_needed) : ordered_json()},
          {"stash_needed", stash_needed > 0 ? ordered_json(stash_needed) : ordered_json()}};
}

ordered_json run_json(const RunRecord& run) {
  const StartLine start = run.starts.empty() ? StartLine() : run.starts.back();
  ordered_json curves = ordered_json::object();
  for (const auto& [name, curve] : run.curves) {
    if (std::find(kNotDrawn.begin(), kNotDrawn.end(), name) != kNotDrawn.end()) continue;
    const RunCurve thin = thin_out(curve, kMostPoints);
    if (!thin.steps.empty()) curves[name] = curve_json(thin);
  }
  ordered_json evaluations = ordered_json::object();
  for (const auto& [name, curve] : run.evaluations) {
    evaluations[name] = curve_json(thin_out(curve, kMostPoints));
  }
  ordered_json overflows = ordered_json::array();
  for (const RoomOverflow& overflow : run.overflows) {
    if (overflows.size() == kMostListed) break;
    overflows.push_back({{"step", overflow.step},
                         {"rooms_lacked", overflow.rooms_lacked},
                         {"room_needed", number_or_null(overflow.room_needed)}});
  }
  const size_t listed = std::min(run.skipped.size(), kMostListed);
  return {{"name", run.name},
          {"folder", printable(run.folder, kLongestValue)},
          {"model", start.model},
          {"parameters", start.parameters},
          {"active_parameters", start.active_parameters},
          {"logged_steps", run.steps.size()},
          {"last_step", run.steps.empty() ? ordered_json() : ordered_json(run.steps.back())},
          {"last_time", run.last_time},
          {"tokens", run.tokens.empty() ? ordered_json() : number_or_null(run.tokens.back())},
          {"seconds", run.work_seconds.empty() ? 0.0 : run.work_seconds.back()},
          {"starts", starts_json(run)},
          {"summary", summary_json(run)},
          {"skipped", std::vector<int64_t>(run.skipped.begin(),
                                           run.skipped.begin() + static_cast<int64_t>(listed))},
          {"overflows", std::move(overflows)},
          {"axes", axes_json(run)},
          {"curves", std::move(curves)},
          {"evaluations", std::move(evaluations)},
          {"loads", loads_json(run.loads)},
          {"notes", run.notes}};
}

// ---- Text ----

constexpr size_t kColumns = kDefaultColumns - 1;
constexpr size_t kLabelColumns = 12;

void add_line(std::string& text, std::string_view label, const std::string& words) {
  // Below the words of the first line: lines begin as it does, and then with an indent.
  std::string line = fmt::format("  {:<{}}", label, kLabelColumns - 2);
  if (!line.ends_with(' ')) line += ' ';
  text += wrap_text(line + words, kColumns, kLabelColumns - 2) + "\n";
}

std::string text_of(double value) {
  return fmt::format("{:.4g}", value);
}

void describe_loss(const RunRecord& run, std::string& text) {
  const RunCurve& loss = curve_of(run, "loss");
  if (const auto end = last(loss)) {
    add_line(text, "loss",
             fmt::format("{:.4f} at step {}, {:.4f} at step {}; lowest {:.4f} at step {}",
                         first(loss)->value, first(loss)->step, end->value, end->step,
                         lowest(loss)->value, lowest(loss)->step));
    add_line(text, "", block_chart(thin_out(loss, kMostPoints).values, kColumns - kLabelColumns));
  }
  for (const auto& [name, curve] : run.evaluations) {
    if (const auto end = last(curve)) {
      add_line(text, name,
               fmt::format("{:.4f} at step {}; lowest {:.4f} at step {}", end->value, end->step,
                           lowest(curve)->value, lowest(curve)->step));
    }
  }
  const RunCurve& norms = curve_of(run, "grad_norm");
  if (const auto most = highest(norms)) {
    add_line(text, "grad norm",
             fmt::format("median {}, highest {} at step {}", text_of(*median(norms)),
                         text_of(most->value), most->step));
  }
}

void describe_speed(const RunRecord& run, std::string& text) {
  const auto tokens = median(curve_of(run, "tokens_per_s"));
  if (!tokens) return;
  std::string words = fmt::format("{} tokens/s", format_count(*tokens));
  if (const auto flops = median(curve_of(run, "tflops_per_gpu"))) {
    words += fmt::format(", {} TFLOP/s of each rank", text_of(*flops));
  }
  if (const auto share = median(curve_of(run, "limit_share"))) {
    words += fmt::format(", {:.0f}% of the limit", 100 * *share);
  }
  add_line(text, "speed", words + " (medians)");
  if (const auto peak = highest(curve_of(run, "peak_bytes"))) {
    add_line(
        text, "memory",
        format_bytes(static_cast<uint64_t>(std::max(0.0, peak->value))) + " allocated at most");
  }
}

// Beside the time of the plan, where the run knew what its hardware reaches.
void describe_step_time(const RunRecord& run, std::string& text) {
  const auto seconds = median(curve_of(run, "step_time_s"));
  const auto planned = last(curve_of(run, "planned_step_time_s"));
  if (!seconds || !planned || !(planned->value > 0)) return;
  add_line(text, "step",
           fmt::format("{} (median), {} planned: {:.2f} times as long", format_duration(*seconds),
                       format_duration(planned->value), *seconds / planned->value));
}

void describe_experts(const RunRecord& run, std::string& text) {
  const RunCurve& imbalance = curve_of(run, "load_imbalance");
  if (run.loads.empty()) return;
  if (const auto most = highest(imbalance)) {
    add_line(text, "experts",
             fmt::format("load imbalance {:.2f} at the end, highest {:.2f} at step {}",
                         last(imbalance)->value, most->value, most->step));
  }
  const RunCurve& dead = curve_of(run, "dead_experts");
  if (const auto most = highest(dead)) {
    add_line(text, "",
             most->value == 0 ? "no dead expert in any logged step"
                              : fmt::format("{:.0f} dead at the end, at most {:.0f} at step {}",
                                            last(dead)->value, most->value, most->step));
  }
  const auto dropped = highest(curve_of(run, "dropped"));
  if (dropped && dropped->value > 0) {
    add_line(text, "",
             fmt::format("{:.1f}% of the choices dropped at most, at step {}", 100 * dropped->value,
                         dropped->step));
  }
}

std::string list_of(const std::vector<int64_t>& steps) {
  constexpr size_t kMost = 8;
  const size_t count = std::min(steps.size(), kMost);
  const auto end = steps.begin() + static_cast<std::ptrdiff_t>(count);
  return fmt::format("{}{}", fmt::join(steps.begin(), end, ", "),
                     steps.size() > kMost ? ", ..." : "");
}

void describe_events(const RunRecord& run, std::string& text) {
  if (!run.skipped.empty()) {
    add_line(text, "skipped",
             fmt::format("{} of the logged steps: {}", run.skipped.size(), list_of(run.skipped)));
  }
  if (!run.overflows.empty()) {
    std::vector<int64_t> steps;
    for (const RoomOverflow& overflow : run.overflows) steps.push_back(overflow.step);
    const auto [room, stash] = needed_by(run.overflows);
    add_line(text, "overflow",
             fmt::format("the experts' room did not suffice in {} logged steps, which ran in "
                         "rounds: {}. {} would do.",
                         steps.size(), list_of(steps), sufficient_room(room, stash)));
  }
  for (const std::string& note : run.notes) add_line(text, "note", note);
}

std::string describe_run(const RunRecord& run) {
  std::string text = wrap_text(run.name, kColumns, 2) + "\n";
  if (!run.starts.empty()) {
    const StartLine& start = run.starts.back();
    const std::string size = fmt::format(
        "{} parameters ({} active)", format_count(static_cast<double>(start.parameters)),
        format_count(static_cast<double>(start.active_parameters)));
    add_line(text, "model", start.model.empty() ? size : start.model + ", " + size);
    const std::string ranks = start.ranks == 1 ? "one rank" : fmt::format("{} ranks", start.ranks);
    const std::string starts =
        run.starts.size() == 1 ? "" : fmt::format(", {} starts", run.starts.size());
    add_line(text, "where", fmt::format("{}, {} on {}{}", ranks, start.device, start.host, starts));
  }
  if (!run.steps.empty()) {
    const double tokens = run.tokens.back();
    add_line(text, "steps",
             fmt::format("{} to {}, {}{}", run.steps.front(), run.steps.back(),
                         std::isfinite(tokens) ? format_count(tokens) + " tokens in " : "",
                         format_duration(run.work_seconds.back())));
  }
  describe_loss(run, text);
  describe_speed(run, text);
  describe_step_time(run, text);
  describe_experts(run, text);
  describe_events(run, text);
  return text;
}

std::string describe_options(std::span<const RunRecord> runs, std::span<const OptionRow> options) {
  const bool several = runs.size() > 1;
  if (options.empty()) return several ? "The options of these runs are the same.\n" : "";
  std::string text =
      several ? "Options that differ\n" : "Options that differ from their defaults\n";
  for (const OptionRow& row : options) {
    std::vector<std::string> values;
    for (const auto& value : row.values) values.push_back(value ? printable(*value) : "not given");
    text += wrap_text(fmt::format("  {}  {}", row.name, fmt::join(values, several ? " | " : "")),
                      kColumns, 6) +
            "\n";
  }
  return text;
}

}  // namespace

std::vector<OptionRow> options_that_differ(std::span<const RunRecord> runs,
                                           const std::map<std::string, std::string>& defaults) {
  std::set<std::string> names;
  for (const RunRecord& run : runs) {
    for (const auto& [name, value] : run.options) names.insert(name);
  }
  const auto value_in = [](const std::map<std::string, std::string>& options,
                           const std::string& name) {
    const auto found = options.find(name);
    return found == options.end() ? std::optional<std::string>() : found->second;
  };
  std::vector<OptionRow> rows;
  for (const std::string& name : names) {
    if (std::find(kPlaces.begin(), kPlaces.end(), name) != kPlaces.end()) continue;
    OptionRow row{.name = printable(name), .values = {}};
    for (const RunRecord& run : runs) row.values.push_back(value_in(run.options, name));
    const auto reference = runs.size() > 1 ? row.values.front() : value_in(defaults, name);
    if (std::all_of(row.values.begin(), row.values.end(),
                    [&](const auto& value) { return value == reference; })) {
      continue;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

RunCurve thin_out(const RunCurve& curve, size_t most) {
  std::vector<size_t> finite;
  for (size_t i = 0; i < curve.values.size(); ++i) {
    if (std::isfinite(curve.values[i])) finite.push_back(i);
  }
  std::vector<size_t> chosen;
  const size_t stretches = (most - 2) / 2;
  if (finite.size() <= most) {
    chosen = finite;
  } else {
    chosen.push_back(finite.front());
    const size_t inner = finite.size() - 2;
    for (size_t i = 0; i < stretches; ++i) {
      const auto begin = finite.begin() + 1 + static_cast<std::ptrdiff_t>(i * inner / stretches);
      const auto end =
          finite.begin() + 1 + static_cast<std::ptrdiff_t>((i + 1) * inner / stretches);
      const auto [low, high] = std::minmax_element(
          begin, end, [&](size_t a, size_t b) { return curve.values[a] < curve.values[b]; });
      chosen.push_back(std::min(*low, *high));
      if (*low != *high) chosen.push_back(std::max(*low, *high));
    }
    chosen.push_back(finite.back());
  }
  RunCurve thin;
  for (const size_t i : chosen) {
    thin.steps.push_back(curve.steps[i]);
    thin.values.push_back(curve.values[i]);
  }
  return thin;
}

nlohmann::ordered_json report_json(std::span<const RunRecord> runs,
                                   std::span<const OptionRow> options) {
  ordered_json document = {{"version", kVersion}, {"runs", ordered_json::array()}};
  for (const RunRecord& run : runs) document["runs"].push_back(run_json(run));
  document["options"] = ordered_json::array();
  for (const OptionRow& row : options) {
    ordered_json values = ordered_json::array();
    for (const auto& value : row.values) {
      values.push_back(value ? ordered_json(printable(*value, kLongestValue)) : ordered_json());
    }
    document["options"].push_back({{"name", row.name}, {"values", std::move(values)}});
  }
  return document;
}

std::string report_text(std::span<const RunRecord> runs, std::span<const OptionRow> options) {
  std::string text;
  for (const RunRecord& run : runs) text += describe_run(run) + "\n";
  return text + describe_options(runs, options);
}

}  // namespace troupe
