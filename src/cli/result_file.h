// A TOML file that a command writes beside what it prints: the result of `plan --search` or of
// `bench --calibrate`. An earlier result is replaced as a whole, any other file is not.
//
// Main thread. Errors are UserErrors that name the flag.
#pragma once

#include <string>
#include <string_view>

namespace troupe {

struct ResultKind {
  std::string_view flag;     // "--search-output"
  std::string_view heading;  // with which each such file begins
  std::string_view name;     // "result of a search"
};

// Before the work, not after it: whether the file may be written. An empty path is none.
void check_result_file(const ResultKind& kind, const std::string& path);

// `text` begins with the heading.
void write_result_file(const std::string& path, const std::string& text);

}  // namespace troupe
