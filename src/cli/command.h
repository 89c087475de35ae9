// The commands: one function each, in the file of its name.
//
// A command gets options that are already checked (train/command_line.h). It prints its result to
// standard output, everything else to standard error, and says how it ended. A UserError ends it
// with that error's status.
#pragma once

#include "base/error.h"
#include "train/options.h"

namespace troupe {

ExitStatus run_train(const Options& options);
ExitStatus run_eval(const Options& options);
ExitStatus run_generate(const Options& options);
ExitStatus run_tokenize(const Options& options);
ExitStatus run_convert(const Options& options);
ExitStatus run_verify(const Options& options);
ExitStatus run_inspect(const Options& options);
ExitStatus run_plan(const Options& options);
ExitStatus run_bench(const Options& options);
ExitStatus run_doctor(const Options& options);

// Runs options.command.
ExitStatus run_command(const Options& options);

}  // namespace troupe
