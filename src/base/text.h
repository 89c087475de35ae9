// Texts from outside in messages. Any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace troupe {

inline constexpr size_t kLongestQuote = 160;      // bytes of a name or a value
inline constexpr size_t kLongestComplaint = 300;  // of what a library says, which quotes in turn

// With question marks for what controls a terminal or turns the direction of writing, but lines.
std::string without_controls(std::string_view text);

// A text from outside, fit for a message: without controls, in one line, the end of long ones cut.
std::string printable(std::string_view text, size_t longest = kLongestQuote);

// The same in quotes: for names from files.
inline std::string quote_name(std::string_view name) {
  return '"' + printable(name) + '"';
}

}  // namespace troupe
