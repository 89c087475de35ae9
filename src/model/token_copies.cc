#include "model/token_copies.h"

#include <algorithm>
#include <map>
#include <utility>

namespace troupe {
namespace {

// C(all - held, drawn) / C(all, drawn).
double chance_of_none(int32_t all, int32_t held, int32_t drawn) {
  double chance = 1;
  for (int32_t i = 0; i < drawn; ++i) {
    chance *= std::max(0.0, static_cast<double>(all - held - i)) / (all - i);
  }
  return chance;
}

// That none of the experts from `first` to `last` - 1 is chosen.
double chance_of_passing(const TokenChoices& choices, int32_t first, int32_t last) {
  const int32_t size = choices.experts / choices.groups;
  // Of the groups looked at: how many are chosen, and how many of the part's experts are in those;
  // and how likely that is.
  std::map<std::pair<int32_t, int32_t>, double> chances = {{{0, 0}, 1.0}};
  int32_t looked_at = 0;
  for (int32_t expert = first; expert < last; ++looked_at) {
    const int32_t end = std::min(last, (expert / size + 1) * size);
    std::map<std::pair<int32_t, int32_t>, double> next;
    for (const auto& [state, chance] : chances) {
      const auto [chosen, held] = state;
      const double is_chosen =
          static_cast<double>(choices.group_topk - chosen) / (choices.groups - looked_at);
      if (is_chosen > 0) next[{chosen + 1, held + end - expert}] += chance * is_chosen;
      if (is_chosen < 1) next[state] += chance * (1 - is_chosen);
    }
    chances = std::move(next);
    expert = end;
  }
  double passing = 0;
  for (const auto& [state, chance] : chances) {
    passing += chance * chance_of_none(choices.group_topk * size, state.second, choices.top_k);
  }
  return passing;
}

}  // namespace

double parts_of_token(const TokenChoices& choices, int32_t parts) {
  const int32_t held = choices.experts / parts;
  const int32_t size = choices.experts / choices.groups;
  if (size % held == 0 || held % size == 0) {  // all parts lie alike in the groups
    return parts * (1 - chance_of_passing(choices, 0, held));
  }
  double sum = 0;
  for (int32_t part = 0; part < parts; ++part) {
    sum += 1 - chance_of_passing(choices, part * held, (part + 1) * held);
  }
  return sum;
}

}  // namespace troupe
