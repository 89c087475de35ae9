// The command line: `troupe COMMAND [FLAGS]` to Options, and the help texts.
//
// All of it follows from the tables of options/options.h. Pure functions, callable from any thread;
// every mistake of the user is a bad request that names the flag and, where it can, the remedy.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "options/options.h"

namespace troupe {

struct CommandLine {
  Options options;
  // For standard error, a line each: what was given and has no effect.
  std::vector<std::string> notes;
  // Not empty: what the user asked for is this text (help or the version) and nothing else.
  std::string text;
};

// `arguments` are those after the program's name. Global flags may also stand before the command.
// Flags are --name VALUE, --name=VALUE, or --name for those without a value. Of a flag that is
// given several times the last one counts, as in argparse, lists included, and a note says so; the
// values of flags that collect (OptionSpec) are all kept. Commands that look at a run (inspect,
// plan, bench) also take those flags of train that they do not use, and all that describe a run the
// flags of Megatron (options/foreign_flags.h). The options of the result have passed
// check_options().
//
// `processes`: how many of them a launcher has started, as ranks of one run, which --ranks must
// say, too, if it is given. Commands that do not run on ranks are then refused.
CommandLine parse_command_line(std::span<const std::string> arguments, int32_t processes = 1);

// `troupe --version`: the version in the first line, then a line each of what the build was.
std::string version_text();

// `troupe --help`: the commands, the global flags, the exit statuses.
std::string overview_help();

// `troupe COMMAND --help`: every option that the command takes.
std::string command_help(Command command);

// All commands and options as a Markdown page (docs/options.md).
std::string options_markdown();

}  // namespace troupe
