// What `troupe report` says of runs: as data for its page and for --json, and as text.
//
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "report/run_record.h"

namespace troupe {

// An option whose value is not the same in all runs, or, of one run, not the default.
struct OptionRow {
  std::string name;
  std::vector<std::optional<std::string>> values;  // by run; empty: not given
};

// `defaults`: what train does without being told, as options.toml would say it.
std::vector<OptionRow> options_that_differ(std::span<const RunRecord> runs,
                                           const std::map<std::string, std::string>& defaults);

// Which points of a curve are shown, at most `most` of them: the first, the last, and of each of
// many stretches the lowest and the highest. Numbers that are not finite are left out.
RunCurve thin_out(const RunCurve& curve, size_t most);

// A document whose fields docs/reports.md names.
nlohmann::ordered_json report_json(std::span<const RunRecord> runs,
                                   std::span<const OptionRow> options);

// At most 80 columns wide.
std::string report_text(std::span<const RunRecord> runs, std::span<const OptionRow> options);

}  // namespace troupe
