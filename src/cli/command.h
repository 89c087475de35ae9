// The commands: one function each, in the file of its name.
//
// A command gets options that are already checked (options/command_line.h). It prints its result to
// standard output, everything else to standard error, and says how it ended. A UserError ends it
// with that error's status. Commands that run on several ranks take these as `processes`, if a
// launcher has started them; all processes then run the command, and that of rank 0 prints.
#pragma once

#include "base/error.h"
#include "comm/process_group.h"
#include "options/options.h"

namespace troupe {

ExitStatus run_train(const Options& options, ProcessGroup* processes);
ExitStatus run_eval(const Options& options, ProcessGroup* processes);
ExitStatus run_generate(const Options& options, ProcessGroup* processes);
ExitStatus run_tokenize(const Options& options);
ExitStatus run_convert(const Options& options);
ExitStatus run_verify(const Options& options, ProcessGroup* processes);
ExitStatus run_inspect(const Options& options);
ExitStatus run_plan(const Options& options);
ExitStatus run_bench(const Options& options, ProcessGroup* processes);
ExitStatus run_report(const Options& options);
ExitStatus run_doctor(const Options& options);

// Runs options.command. `processes`: null where this one is alone.
ExitStatus run_command(const Options& options, ProcessGroup* processes);

}  // namespace troupe
