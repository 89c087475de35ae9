// What every fuzz target shares. A target is one file, <name>_fuzz.cc, that defines the two
// functions below; the harness gives them to libFuzzer.
//
// A parser may accept its input or throw a UserError whose message is fit to be shown: not empty,
// one line without control characters, of bounded length. Anything else is a finding: another
// exception, a failed TROUPE_CHECK, a report of a sanitizer, too much memory or time (the limits
// are in fuzz/run.sh). One thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace troupe::fuzz {

// ---- Defined by the target ----

// Gives one input to the parser. UserErrors pass through.
void parse(std::string_view input);

// Inputs to start from: what the writers of this project write, and what others wrote.
std::vector<std::string> seeds();

// ---- Offered to the target ----

// For parsers that read files: a folder of this process in memory. It goes when the process ends
// without a finding.
const std::string& scratch_folder();

// Puts a file into it, replacing one of that name, and returns its path.
std::string put_file(std::string_view name, std::string_view contents);

// The contents of a file of the source tree.
std::string read_source_file(std::string_view path_in_tree);

// Prints the message and aborts: what a target calls when an accepted input breaks a promise.
[[noreturn]] void report_finding(const std::string& message);

}  // namespace troupe::fuzz
