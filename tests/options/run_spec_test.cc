// What the parts of a run take from the options.
#include "options/run_spec.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/errors.h"

namespace troupe {
namespace {

TEST(ProfileSpec, CoversStepsThatAreAskedFor) {
  Options options;
  EXPECT_FALSE(profile_spec_of(options).covers(11));
  options.profile = true;
  const ProfileSpec spec = profile_spec_of(options);
  EXPECT_FALSE(spec.covers(10)) << "Megatron's defaults: after 10, through 12";
  EXPECT_TRUE(spec.covers(11));
  EXPECT_TRUE(spec.covers(12));
  EXPECT_FALSE(spec.covers(13));
}

TEST(ProfileSpec, HasRanksThatAreAskedFor) {
  Options options;
  options.ranks = 4;
  EXPECT_EQ(profile_spec_of(options).ranks_or({0}), std::vector<int32_t>{0});
  options.profile_ranks = {"3", "1", "3"};
  EXPECT_EQ(profile_spec_of(options).ranks_or({0}), (std::vector<int32_t>{1, 3}));
  for (const char* unknown : {"4", "-1", "1x", ""}) {
    options.profile_ranks = {unknown};
    EXPECT_EQ(testing::message_of(ExitStatus::bad_request, [&] { profile_spec_of(options); }),
              fmt::format("--profile-ranks {}: there are the ranks 0 to 3 (--ranks).", unknown));
  }
}

TEST(RunSpec, LeavesOutStepsThatAreNumbersFrom1) {
  Options options;
  options.iterations_to_skip = {"3", "1", "3"};
  EXPECT_EQ(run_spec_of(options).length.left_out, (std::set<int64_t>{1, 3}));
  for (const char* wrong : {"0", "-1", "x", "1x", ""}) {
    options.iterations_to_skip = {wrong};
    EXPECT_EQ(testing::message_of(ExitStatus::bad_request, [&] { run_spec_of(options); }),
              fmt::format("--iterations-to-skip \"{}\": steps are whole numbers from 1.", wrong));
  }
}

TEST(EvaluationSpec, HasTheBatchOfAStepUnlessItHasItsOwn) {
  Options options;
  options.ranks = 2;
  options.micro_batch_size = 3;
  options.eval_iters = 5;
  EXPECT_EQ(run_spec_of(options).evaluation.samples(/*trained=*/7), 35)
      << "unchecked: a step's own";
  options.eval_micro_batch_size = 2;
  EXPECT_EQ(run_spec_of(options).evaluation.samples(8), 40);
  EXPECT_EQ(
      testing::message_of(ExitStatus::bad_request,
                          [&] { run_spec_of(options).evaluation.samples(6); }),
      "--eval-global-batch-size 6: it must be a multiple of --eval-micro-batch-size 2 x DP 2.");
  options.eval_global_batch_size = 4;
  EXPECT_EQ(run_spec_of(options).evaluation.samples(6), 20);
}

}  // namespace
}  // namespace troupe
