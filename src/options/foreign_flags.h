// Flags of Megatron that are no options here: what happens to somebody who brings one along.
//
// A flag is accepted when it asks for what is always so here, or only chooses how fast Megatron
// runs or what it reports; it then changes nothing, and a line says so. It is refused when leaving
// it out would give other numbers, or another run, than its owner expects. A name that is an option
// (options/options.h) does not stand here.
//
// Constant; callable from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "options/options.h"

namespace troupe {

enum class ForeignValues : uint8_t { none, one, many };

struct ForeignFlag {
  std::string_view name = {};  // without dashes
  bool accepted = false;
  ForeignValues values = ForeignValues::none;
  std::string_view only = {};  // accepted with these values alone, separated by blanks; empty: any
  std::string_view choices = {};  // the values that Megatron takes; empty: any
  std::string_view reason = {};   // a sentence or two
};

// Grouped by subject.
std::span<const ForeignFlag> foreign_flags();

// Hyphens and underscores being the same; null for flags that are not known to be Megatron's.
const ForeignFlag* find_foreign_flag(std::string_view name);

// Whether `command` accepts flags of Megatron's training: those commands that describe or make a
// training run do.
bool takes_foreign_flags(Command command);

// The line about an accepted flag that was given with `value` (empty for flags without one; several
// are joined by blanks). Another value than those in `only` or `choices` (equal as numbers or as
// texts) is a bad request, as is a flag that is not accepted.
std::string accept_foreign_flag(const ForeignFlag& flag, std::string_view value);

}  // namespace troupe
