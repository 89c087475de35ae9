// To how many ranks tokens go: against an enumeration of all choices, and two known numbers.
#include "model/token_copies.h"

#include <bit>
#include <gtest/gtest.h>

namespace troupe {
namespace {

// The header's definition: every choice of groups, and in them of experts, counts the same.
double enumerated_parts_of_token(const TokenChoices& choices, int32_t parts) {
  const int32_t size = choices.experts / choices.groups;
  const int32_t held = choices.experts / parts;
  double sum = 0;
  double count = 0;
  for (uint32_t groups = 0; groups < 1U << choices.groups; ++groups) {
    if (std::popcount(groups) != choices.group_topk) continue;
    for (uint32_t experts = 0; experts < 1U << choices.experts; ++experts) {
      if (std::popcount(experts) != choices.top_k) continue;
      uint32_t reached = 0;
      bool is_allowed = true;
      for (int32_t expert = 0; expert < choices.experts; ++expert) {
        if ((experts >> expert & 1) == 0) continue;
        is_allowed = is_allowed && (groups >> (expert / size) & 1) != 0;
        reached |= 1U << (expert / held);
      }
      if (!is_allowed) continue;
      sum += std::popcount(reached);
      count += 1;
    }
  }
  return sum / count;
}

TEST(TokenCopies, AreThoseOfAllChoicesOfSmallNumbers) {
  for (const TokenChoices& choices :
       {TokenChoices{.experts = 12, .top_k = 1}, TokenChoices{.experts = 12, .top_k = 5},
        TokenChoices{.experts = 12, .top_k = 12},
        TokenChoices{.experts = 12, .top_k = 3, .groups = 4, .group_topk = 2},
        TokenChoices{.experts = 12, .top_k = 4, .groups = 6, .group_topk = 3},
        TokenChoices{.experts = 12, .top_k = 2, .groups = 3, .group_topk = 1},
        TokenChoices{.experts = 12, .top_k = 6, .groups = 2, .group_topk = 2},
        TokenChoices{.experts = 10, .top_k = 3, .groups = 5, .group_topk = 2}}) {
    for (const int32_t parts : {1, 2, 3, 4, 5, 6, 10, 12}) {
      if (choices.experts % parts != 0) continue;
      // Tens of additions and products of numbers below 12.
      EXPECT_NEAR(parts_of_token(choices, parts), enumerated_parts_of_token(choices, parts), 1e-12)
          << choices.top_k << " of " << choices.experts << " experts, " << choices.group_topk
          << " of " << choices.groups << " groups, " << parts << " parts";
    }
  }
}

TEST(TokenCopies, OfQwen3AreSixOfSixteenRanks) {
  EXPECT_NEAR(parts_of_token({.experts = 128, .top_k = 8}, 16), 6.5965, 0.0001);
}

// A rank has a group, of which half are chosen; 8 (1 - C(224, 8) / C(256, 8)) = 5.29 without
// groups.
TEST(TokenCopies, OfGroupLimitedRoutingAreFewer) {
  const TokenChoices deepseek_v3{.experts = 256, .top_k = 8, .groups = 8, .group_topk = 4};
  EXPECT_NEAR(parts_of_token(deepseek_v3, 8), 3.629, 0.001);
  EXPECT_NEAR(parts_of_token({.experts = 256, .top_k = 8}, 8), 5.295, 0.001);
}

}  // namespace
}  // namespace troupe
