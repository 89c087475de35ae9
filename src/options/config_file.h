// Options from a TOML file (--config): the flags' names without dashes, hyphens and underscores
// being the same, and their values: numbers, strings, true and false, arrays for flags that may be
// repeated or take several values.
//
// One thread. Every mistake is a bad request that names the file and the line: an unknown name
// (with the nearest known one), a name given twice, a value that the flag would not take.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "options/options.h"

namespace troupe {

// Sets what the file at `path` holds and `given` (flags of the command line, which win) does not
// set, and adds those options to `given`. Options that options.command does not take are left out,
// so that one file serves several commands. Appends the lines of accepted flags of Megatron
// (options/foreign_flags.h) to `notes`.
void read_config_file(const std::string& path, Options& options, std::set<const OptionSpec*>& given,
                      std::vector<std::string>& notes);

// What the text of such a file says, by name, each value as text, those of a list joined with
// blanks. Names and values need not be known here: the file may be of another version. `path` is
// for messages.
std::map<std::string, std::string> option_texts(const std::string& text, const std::string& path);

}  // namespace troupe
