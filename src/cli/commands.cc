#include <string>

#include "cli/command.h"

namespace troupe {
namespace {

struct Entry {
  Command command;
  ExitStatus (*run)(const Options&);
};
struct RanksEntry {
  Command command;
  ExitStatus (*run)(const Options&, ProcessGroup*);
};

constexpr Entry kEntries[] = {
    {Command::tokenize, run_tokenize}, {Command::convert, run_convert},
    {Command::inspect, run_inspect},   {Command::plan, run_plan},
    {Command::report, run_report},     {Command::doctor, run_doctor},
};
constexpr RanksEntry kRanksEntries[] = {
    {Command::train, run_train},   {Command::eval, run_eval},   {Command::generate, run_generate},
    {Command::verify, run_verify}, {Command::bench, run_bench},
};

}  // namespace

ExitStatus run_command(const Options& options, ProcessGroup* processes) {
  for (const RanksEntry& entry : kRanksEntries) {
    if (entry.command == options.command) return entry.run(options, processes);
  }
  for (const Entry& entry : kEntries) {
    if (entry.command == options.command) return entry.run(options);
  }
  throw_bad_request("this build has no command " + std::string(info_of(options.command).name) +
                    ".");
}

}  // namespace troupe
