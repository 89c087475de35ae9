// What the folder of a run says of it (docs/run_folder.md): metrics.jsonl and options.toml, read
// once. Files of running and of killed runs are read, too: a line that says nothing is counted,
// noted and left out.
//
// Plain values; any thread. Errors are UserErrors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "report/load_history.h"

namespace troupe {

// A header line.
struct StartLine {
  int64_t step = 0;  // steps done before
  std::string time = {};
  std::string host = {};
  std::string device = {};
  std::string version = {};
  std::string commit = {};
  std::string model = {};
  int64_t ranks = 0;
  int64_t parameters = 0;
  int64_t active_parameters = 0;
  double matmul_limit_tflops = 0;  // of a rank; 0: not known
};

// Numbers at steps, which rise. A number that was not finite is NaN.
struct RunCurve {
  std::vector<int64_t> steps;
  std::vector<double> values;
};

// A step whose experts had too little room, so that it ran again in rounds. The factors that would
// have sufficed, of a layer's room and of the stash: NaN where there was enough of it.
struct RoomOverflow {
  int64_t step = 0;
  double rooms_lacked = 0;
  double room_needed = 0;
  double stash_needed = 0;
};

struct RunRecord {
  std::string folder;
  std::string name;               // for legends: the shortest end of the path that tells runs apart
  std::vector<StartLine> starts;  // may be empty
  std::map<std::string, std::string> options;  // of options.toml, as texts

  std::vector<int64_t> steps;        // those that were logged
  std::vector<double> tokens;        // by logged step
  std::vector<double> work_seconds;  // by logged step: since its start, and those of starts before
  std::string last_time;             // of the last line
  // Every number of the lines of steps, by its name in them; and of the experts of all layers:
  // dead_experts (sum), dropped and router_entropy (means); limit_share of 1.
  std::map<std::string, RunCurve, std::less<>> curves;
  std::map<std::string, RunCurve> evaluations;  // by "val_loss", "val_loss/NAME", "test_loss"
  std::vector<int64_t> skipped;                 // steps
  std::vector<RoomOverflow> overflows;
  LoadHistory loads;

  std::vector<std::string> notes;  // what was left out, a sentence each
};

// Reads the folder of a run, or of the metrics.jsonl that `path` names. A folder without one is a
// bad request.
RunRecord read_run(const std::string& path);

// Names each run by the end of its path that tells it from the others.
void name_runs(std::vector<RunRecord>& runs);

}  // namespace troupe
