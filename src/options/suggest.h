// What a mistyped name probably meant. Pure; callable from any thread.
#pragma once

#include <span>
#include <string_view>

namespace troupe {

// The candidate nearest to `name`: the fewest letters inserted, left out, replaced or swapped with
// their neighbour, where - and _ count as the same; at most a third of the name's letters (and 4).
// Failing that, the only candidate that starts with `name`. Empty when nothing is near. Of equally
// near candidates, the first.
std::string_view closest(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace troupe
