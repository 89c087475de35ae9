// Megatron's flags that have no meaning here, or would not do what they say, and what to say to
// somebody who brings one along.
// Constant; callable from any thread.
#pragma once

#include <string_view>

namespace troupe {

// The answer for a flag (without dashes), hyphens and underscores being the same: a sentence or
// two. Empty for flags that are not known to be Megatron's.
std::string_view answer_to_foreign_flag(std::string_view name);

}  // namespace troupe
