// What the parts of a run take from the options.
#include "options/run_spec.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "options/model_options.h"
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

TEST(LengthSpec, LeavesOutStepsThatAreNumbersFrom1) {
  Options options;
  options.iterations_to_skip = {"3", "1", "3"};
  EXPECT_EQ(length_spec_of(options).left_out, (std::set<int64_t>{1, 3}));
  for (const char* wrong : {"0", "-1", "x", "1x", ""}) {
    options.iterations_to_skip = {wrong};
    EXPECT_EQ(testing::message_of(ExitStatus::bad_request, [&] { length_spec_of(options); }),
              fmt::format("--iterations-to-skip \"{}\": steps are whole numbers from 1.", wrong));
  }
}

TEST(EvaluationSpec, HasTheBatchOfAStepUnlessItHasItsOwn) {
  Options options;
  options.ranks = 2;
  options.micro_batch_size = 3;
  options.eval_iters = 5;
  EXPECT_EQ(evaluation_spec_of(options).samples(/*trained=*/7), 35) << "unchecked: a step's own";
  options.eval_micro_batch_size = 2;
  EXPECT_EQ(evaluation_spec_of(options).samples(8), 40);
  EXPECT_EQ(
      testing::message_of(ExitStatus::bad_request, [&] { evaluation_spec_of(options).samples(6); }),
      "--eval-global-batch-size 6: it must be a multiple of --eval-micro-batch-size 2 x DP 2.");
  options.eval_global_batch_size = 4;
  EXPECT_EQ(evaluation_spec_of(options).samples(6), 20);
}

Options options_of_run() {
  Options options;
  options.model = "quickstart";
  options.ranks = 2;
  options.micro_batch_size = 3;
  options.mock_data = true;
  options.lr = 0.1;
  options.train_iters = 5;
  return options;
}

TEST(RunSpec, ResolvesAllPartsForOneModel) {
  Options options = options_of_run();
  options.seq_length = 16;
  options.global_batch_size = 12;
  const RunSpec spec = run_spec_of(options, std::nullopt, nullptr);
  EXPECT_EQ(spec.step.model.hidden_size, load_model_config(options).hidden_size);
  EXPECT_TRUE(spec.config_path.ends_with("quickstart.json")) << spec.config_path;
  EXPECT_EQ(spec.step.layout->layout.dp(), 2);
  EXPECT_EQ(spec.step.options.micro_batches, 2);
  EXPECT_EQ(spec.step.options.sequence, 16);
  EXPECT_EQ(spec.batch_sizes.largest(), 12);
  EXPECT_EQ(spec.schedules.learning_rate.max_lr, 0.1);
  EXPECT_TRUE(spec.data.mock);
  EXPECT_EQ(spec.tokenizer.type, "byte");
}

TEST(RunSpec, TakesFromACheckpointWhatNoFlagSays) {
  const Options said = options_of_run();
  SavedArgs saved;
  saved.model = load_model_config(said);
  saved.sequence = 8;
  saved.compute_dtype = DType::f64;
  saved.tokenizer.type = "NullTokenizer";
  saved.tokenizer.contents = "259";
  saved.model.hidden_size *= 2;
  Options options = said;
  options.model.clear();
  RunSpec spec = run_spec_of(options, saved, nullptr);
  EXPECT_EQ(spec.step.model.hidden_size, saved.model.hidden_size);
  EXPECT_EQ(spec.config_path, "") << "the checkpoint describes the model";
  EXPECT_EQ(spec.step.dtype, DType::f64);
  EXPECT_EQ(spec.step.options.sequence, 8);
  EXPECT_EQ(spec.tokenizer.contents, "259");
  EXPECT_EQ(value_text(spec.options, "tokenizer-type"), "NullTokenizer") << "as is saved again";

  options.seq_length = 4;
  options.compute_dtype = DType::bf16;
  spec = run_spec_of(options, saved, nullptr);
  EXPECT_EQ(spec.step.options.sequence, 4);
  EXPECT_EQ(spec.step.dtype, DType::bf16);
  spec = run_spec_of(said, saved, nullptr);
  EXPECT_EQ(spec.step.model.hidden_size, load_model_config(said).hidden_size) << "--model";
}

}  // namespace
}  // namespace troupe
