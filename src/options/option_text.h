// What every page about options says of each of them, whatever its form: the help, docs/options.md,
// the man page. Pure functions of the tables in options/options.h; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "options/options.h"

namespace troupe {

struct ExitStatusText {
  ExitStatus status;
  std::string_view text;
};
std::span<const ExitStatusText> exit_status_texts();

// The flag and what stands for its value: "--lr X".
std::string usage_of(const OptionSpec& spec);

// What holds without the flag. Empty for flags without a value.
std::string default_text(const OptionSpec& spec);

// The options of every command.
bool is_global(const OptionSpec& spec);

// What it does, with its default and its range in brackets.
std::string explanation_of(const OptionSpec& spec, Command command);

// "troupe verify HF_DIR [FLAGS]": what must be given, by name.
std::string usage_line(Command command);

}  // namespace troupe
