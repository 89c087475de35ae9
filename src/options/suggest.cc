#include "options/suggest.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace troupe {
namespace {

bool same_letter(char a, char b) {
  return a == b || (a == '-' && b == '_') || (a == '_' && b == '-');
}

// Optimal string alignment: the Damerau-Levenshtein distance in which no part is edited twice.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1);
  std::vector<size_t> previous(b.size() + 1);
  std::vector<size_t> current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) current[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(before, previous);
    std::swap(previous, current);
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = previous[j - 1] + (same_letter(a[i - 1], b[j - 1]) ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, replace});
      const bool swapped =
          i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]);
      if (swapped) current[j] = std::min(current[j], before[j - 2] + 1);
    }
  }
  return current[b.size()];
}

}  // namespace

std::string_view closest(std::string_view name, std::span<const std::string_view> candidates) {
  std::string_view best;
  size_t best_distance = std::clamp<size_t>(name.size() / 3, 1, 4) + 1;
  for (std::string_view candidate : candidates) {
    // Each letter that one name has more is an edit: names of a quite different length need no
    // table, whose size is the product of both.
    const size_t lengths_apart =
        std::max(name.size(), candidate.size()) - std::min(name.size(), candidate.size());
    if (lengths_apart >= best_distance) continue;
    const size_t candidate_distance = distance(name, candidate);
    // A name without a letter in common is no typing mistake.
    if (candidate_distance < best_distance && candidate_distance < candidate.size()) {
      best = candidate;
      best_distance = candidate_distance;
    }
  }
  if (!best.empty() || name.empty()) return best;
  const auto starts = [&](std::string_view candidate) { return candidate.starts_with(name); };
  if (std::count_if(candidates.begin(), candidates.end(), starts) != 1) return {};
  return *std::find_if(candidates.begin(), candidates.end(), starts);
}

}  // namespace troupe
