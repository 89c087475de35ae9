// What is said where ranks were not all started with the same options.
#include "train/rank_run.h"

#include <chrono>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "options/command_line.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

// Of ranks that were started with these flags besides; empty: they may begin.
std::string refusal_of(const std::vector<std::vector<std::string>>& flags_of_ranks) {
  ThreadGroup group(static_cast<int>(flags_of_ranks.size()), std::chrono::seconds(60));
  const auto start = [&] {
    run_ranks(group, [&](int rank) {
      std::vector<std::string> words = {"train",         "--model", "quickstart", "--mock-data",
                                        "--train-iters", "2",       "--lr",       "1"};
      const auto& more = flags_of_ranks[static_cast<size_t>(rank)];
      words.insert(words.end(), more.begin(), more.end());
      require_same_options(parse_command_line(words).options, group, rank);
    });
  };
  return message_of(ExitStatus::bad_request, start);
}

TEST(RequireSameOptions, NamesEightOptionsAndHowManyMoreThereAre) {
  std::vector<std::string> more = {
      "--seed",       "5", "--train-iters",  "3", "--seq-length",    "8", "--log-interval", "7",
      "--eval-iters", "9", "--weight-decay", "2", "--save-interval", "6", "--min-lr",       "0.5"};
  const std::string eight = refusal_of({{}, more});
  more.insert(more.end(), {"--clip-grad", "3"});
  const std::string nine = refusal_of({{}, more});
  const std::string end = ". Give all ranks the same flags.";
  ASSERT_TRUE(eight.ends_with(end)) << eight;
  EXPECT_EQ(eight.find("others"), std::string::npos) << eight;
  EXPECT_NE(nine.find(" and 1 others" + end), std::string::npos) << nine;
}

TEST(RequireSameOptions, NamesTheRanksOfEachDifference) {
  const std::string text = refusal_of({{}, {"--seed", "5"}, {"--seed", "5"}, {"--seed", "6"}, {}});
  EXPECT_NE(text.find("ranks 1, 2 with --seed 5 instead of 1234"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 3 with --seed 6 instead of 1234. Give"), std::string::npos) << text;
}

}  // namespace
}  // namespace troupe::testing
