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

// Every field of what a run loads, saves and prints, and of how far it goes.
std::string text_of(const RunSpec& spec) {
  const LoadSpec& load = spec.load;
  const SaveSpec& save = spec.save;
  const ReportSpec& report = spec.report;
  const LengthSpec& length = spec.length;
  return fmt::format("load '{}' {} {} {} '{}' {} {} {} {} {} {} {}\n", load.folder,
                     load.step.value_or(-1), load.is_required, load.finetune, load.pretrained,
                     load.upcycling_granularity, load.optimizer, load.any_seed, load.any_data,
                     load.takes_model, load.keeps_schedules, load.any_schedules) +
         fmt::format("save '{}' {} {} {} {} {} {} {}\n", save.folder, save.optimizer, save.seed,
                     save.interval.value_or(-1), save.minutes, save.newest,
                     save.retain_interval.value_or(-1), save.best) +
         fmt::format("report {} {} {} {} '{}' {} {} {} {} {} {}\n", report.quiet, report.verbose,
                     report.json, report.log_interval, report.tensorboard_folder,
                     report.memory_curve, report.timer_curves, report.watch_gradients,
                     report.routing.load_imbalance, report.routing.dead_experts,
                     report.routing.router_entropy) +
         fmt::format("length {} {} {} {} {} {} {}\n", length.steps.value_or(-1),
                     length.samples.value_or(-1), length.left_out.size(), length.max_skipped_steps,
                     length.exit_after_step.value_or(-1), length.exit_interval.value_or(-1),
                     length.exit_minutes.value_or(-1)) +
         fmt::format("profile {} {} {}, oracle {}, hardware '{}', of '{}'\n", spec.profile.enabled,
                     spec.profile.last_step, spec.profile.folder, spec.oracle, spec.hardware,
                     spec.model_name);
}

TEST(RunSpec, HasWhatFlagsSayOfLoadingSavingAndPrinting) {
  Options options = options_of_run();
  EXPECT_EQ(text_of(run_spec_of(options, std::nullopt, nullptr)),
            "load '' -1 false false '' 0 true false false false false false\n"
            "save '' true true -1 15 0 -1 false\n"
            "report false false false 1 '' false false false 0 0 0\n"
            "length 5 -1 0 20 -1 -1 -1\n"
            "profile false 0 , oracle false, hardware '', of 'quickstart'\n");
  options.load = "old";
  options.ckpt_step = 3;
  options.exit_on_missing_checkpoint = options.finetune = options.no_load_optim = true;
  options.pretrained_checkpoint = "weights";
  options.moe_upcycling_granularity = 2;
  options.no_load_rng = options.allow_changed_data = options.use_checkpoint_args = true;
  options.use_checkpoint_opt_param_scheduler = options.override_opt_param_scheduler = true;
  options.save = "new";
  options.no_save_optim = options.no_save_rng = options.save_best = true;
  options.save_interval = 4;
  options.save_interval_minutes = 2.5;
  options.keep_checkpoints = 6;
  options.save_retain_interval = 7;
  options.quiet = options.verbose = options.json = true;
  options.log_interval = 8;
  options.tensorboard_dir = "curves";
  options.log_memory_to_tensorboard = options.log_timers_to_tensorboard = true;
  options.check_for_large_grads = true;
  options.warn_load_imbalance = 1.5;
  options.warn_dead_experts = 0.25;
  options.warn_router_entropy = 0.125;
  options.iterations_to_skip = {"2"};
  options.max_skipped_steps = 9;
  options.exit_after_step = 10;
  options.exit_interval = 11;
  options.exit_duration_in_mins = 12.5;
  options.profile = options.oracle = true;
  options.profile_step_end = 13;
  options.profile_dir = "times";
  options.hardware = "none";
  EXPECT_EQ(text_of(run_spec_of(options, std::nullopt, nullptr)),
            "load 'old' 3 true true 'weights' 0 false true true true true true\n"
            "save 'new' false false 4 2.5 6 7 true\n"
            "report true true true 8 'curves' true true true 1.5 0.25 0.125\n"
            "length 5 -1 1 9 10 11 12.5\n"
            "profile true 13 times, oracle true, hardware 'none', of 'quickstart'\n");
  options.moe_use_upcycling = true;
  EXPECT_EQ(load_spec_of(options).upcycling_granularity, 2);
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
