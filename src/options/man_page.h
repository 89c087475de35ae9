// The man page troupe(1), in man's macros: `troupe help --man`, which installing writes.
//
// All of it follows from the tables of options/options.h. A pure function; any thread.
#pragma once

#include <string>

namespace troupe {

std::string man_page();

}  // namespace troupe
