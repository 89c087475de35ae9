// What a run that goes on is told differently from its checkpoint, as far as it changes numbers.
// Pure; any thread.
#pragma once

#include <string>
#include <vector>

#include "options/options.h"

namespace troupe {

// One line for each option that was `options_json` (to_json of the options that the checkpoint was
// saved with) and now is another and changes what is computed: "changed since the checkpoint:
// --clip-grad 1 -> 0.5". Those that make it another run come first and say "Warning"; those of the
// layout change the order of sums at most. Options that only say how long, how often or where to
// are not named. Unknown options of another version are passed over.
std::vector<std::string> changed_option_lines(const std::string& options_json, const Options& now);

}  // namespace troupe
