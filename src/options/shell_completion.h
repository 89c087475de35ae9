// Scripts by which shells complete the command line: `troupe help --completion SHELL`, which
// installing writes to where each shell looks.
//
// Commands, their flags and the choices of flags follow from the tables of options/options.h; where
// a value is anything else, shells offer files. Pure functions; any thread.
#pragma once

#include <string>

#include "options/options.h"

namespace troupe {

std::string shell_completion(Shell shell);

}  // namespace troupe
