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

RankFacts numbered_facts(int count, const std::string& value) {
  RankFacts facts;
  for (int i = 0; i < count; ++i) facts.push_back({std::to_string(i), value});
  return facts;
}

TEST(RankAgreement, ALongListIsCut) {
  const auto differences = [](int count) {
    return fact_differences(numbered_facts(count, "a"), numbered_facts(count, "b"));
  };
  const std::string five =
      "0 is b instead of a; 1 is b instead of a; 2 is b instead of a; 3 is b instead of a; "
      "4 is b instead of a";
  EXPECT_EQ(differences(5), five);
  EXPECT_EQ(differences(6), five + "; and 1 more");
  EXPECT_EQ(differences(9), five + "; and 4 more");
  EXPECT_EQ(fact_differences({{"x", "a"}}, {{"x", "a\n"}, {"y", "b"}}), "x is a? instead of a");
}

TEST(RankAgreement, ManyRanksAreCutToo) {
  const auto of_ranks = [](size_t differing) {
    std::vector<RankFacts> facts(differing + 1, {{"the data set a", "y"}});
    facts[0] = {{"the data set a", "x"}};
    return refusal(facts);
  };
  const std::string rest =
      " were not started as rank 0 was. On rank 1: the data set a is y instead of x. Give all "
      "ranks the same flags, and folders that all hosts share, or the same copies of them.";
  EXPECT_EQ(of_ranks(8), "Ranks 1, 2, 3, 4, 5, 6, 7, 8" + rest);
  EXPECT_EQ(of_ranks(9), "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 more" + rest);
}

// What cannot be written as JSON is replaced, not a reason to end.
TEST(RankAgreement, NamesNeedNotBeText) {
  const std::string text = refusal({{{"caf\xe9", "x"}}, {{"caf\xe9", "y"}}});
  EXPECT_TRUE(text.starts_with("Rank 1 was not started as rank 0 was. On rank 1: caf")) << text;
}

}  // namespace
}  // namespace troupe
