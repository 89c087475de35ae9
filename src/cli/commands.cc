#include <string>

#include "cli/command.h"

namespace troupe {
namespace {

struct Entry {
  Command command;
  ExitStatus (*run)(const Options&);
};

constexpr Entry kEntries[] = {
    {Command::eval, run_eval},         {Command::generate, run_generate},
    {Command::tokenize, run_tokenize}, {Command::convert, run_convert},
    {Command::inspect, run_inspect},   {Command::plan, run_plan},
    {Command::doctor, run_doctor},
};

}  // namespace

ExitStatus run_command(const Options& options, ProcessGroup* processes) {
  if (options.command == Command::train) return run_train(options, processes);
  if (options.command == Command::verify) return run_verify(options, processes);
  if (options.command == Command::bench) return run_bench(options, processes);
  for (const Entry& entry : kEntries) {
    if (entry.command == options.command) return entry.run(options);
  }
  throw_bad_request("this build has no command " + std::string(info_of(options.command).name) +
                    ".");
}

}  // namespace troupe
