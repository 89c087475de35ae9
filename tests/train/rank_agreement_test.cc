// Ranks that were not started alike: who differs, and in what.
#include "train/rank_agreement.h"

#include <chrono>
#include <gtest/gtest.h>
#include <string>

#include "base/error.h"
#include "comm/thread_group.h"

namespace troupe {
namespace {

RankFacts facts_with(double clip) {
  return {{"the position in the data", "7"}, {"the clip", std::to_string(clip)}};
}

std::string refusal(const std::vector<RankFacts>& facts) {
  ThreadGroup group(static_cast<int>(facts.size()), std::chrono::seconds(20));
  try {
    run_ranks(group, [&](int rank) {
      require_same_facts(&group, rank, facts[static_cast<size_t>(rank)]);
    });
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::bad_request);
    return error.what();
  }
  return "";
}

TEST(RankAgreement, NamesTheRanksAndWhatDiffers) {
  EXPECT_EQ(refusal({facts_with(1), facts_with(1), facts_with(1)}), "");
  const std::string one = refusal({facts_with(1), facts_with(1), facts_with(0.5)});
  EXPECT_TRUE(
      one.starts_with("Rank 2 was not started as rank 0 was. On rank 2: the clip is 0.500000 "
                      "instead of 1.000000. "))
      << one;
  const std::string two = refusal({facts_with(1), facts_with(0.25), facts_with(0.5)});
  EXPECT_TRUE(
      two.starts_with("Ranks 1, 2 were not started as rank 0 was. On rank 1: the clip is "
                      "0.250000 instead of 1.000000. "))
      << two;
}

TEST(RankAgreement, AFactThatOneHasNotIsNotCompared) {
  EXPECT_EQ(refusal({{{"the data set a", "x"}}, {}}), "");
  EXPECT_NE(refusal({{{"the data set a", "x"}}, {{"the data set a", "y"}}}), "");
}

TEST(RankAgreement, ALongListIsCut) {
  RankFacts left;
  RankFacts right;
  for (int i = 0; i < 9; ++i) {
    left.push_back({std::to_string(i), "left"});
    right.push_back({std::to_string(i), "right"});
  }
  const std::string text = fact_differences(left, right);
  EXPECT_NE(text.find("4 is right instead of left; and 4 more"), std::string::npos) << text;
  EXPECT_EQ(text.find("5 is"), std::string::npos) << text;
}

}  // namespace
}  // namespace troupe
