// `troupe report`: what runs did, as a page of charts and in short as text or as JSON.
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/command.h"
#include "io/file.h"
#include "options/config_file.h"
#include "report/page.h"
#include "report/run_report.h"
#include "train/interrupt.h"
#include "train/terminal.h"

namespace troupe {
namespace {

std::vector<RunRecord> read_runs(const std::vector<std::string>& paths) {
  std::vector<RunRecord> runs;
  std::set<std::string> folders;
  for (const std::string& path : paths) {
    runs.push_back(read_run(path));
    if (!folders.insert(runs.back().folder).second) {
      throw_bad_request(fmt::format("{} is given twice.", runs.back().folder));
    }
  }
  name_runs(runs);
  return runs;
}

std::string output_of(const Options& options, const std::vector<RunRecord>& runs) {
  if (!options.output.empty()) return options.output;
  return runs.size() == 1 ? join_path(runs.front().folder, "report.html") : "report.html";
}

std::string title_of(const std::vector<RunRecord>& runs) {
  return runs.size() == 1 ? "Run " + runs.front().name : fmt::format("{} runs", runs.size());
}

}  // namespace

ExitStatus run_report(const Options& options) {
  end_at_once_when_interrupted(/*quiet=*/false);
  const std::vector<RunRecord> runs = read_runs(options.runs);
  const std::string output = output_of(options, runs);
  check_page_path(PageKind::runs, output, "--output");
  Options defaults;
  defaults.command = Command::train;
  const std::vector<OptionRow> rows =
      options_that_differ(runs, option_texts(to_toml(defaults), "the defaults"));
  nlohmann::ordered_json document = report_json(runs, rows);
  document["title"] = title_of(runs);
  write_page(PageKind::runs, output, "--output",
             make_page(PageKind::runs, title_of(runs), document));
  if (options.json) {
    document["page"] = output;
    fmt::print("{}\n", document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    return ExitStatus::done;
  }
  const std::string where = fmt::format("The page with its charts: {}", output);
  fmt::print("{}\n{}\n", report_text(runs, rows), wrap_text(where, kDefaultColumns - 1, 2));
  return ExitStatus::done;
}

}  // namespace troupe
