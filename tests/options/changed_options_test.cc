// What a run that goes on says about options that are not those of its checkpoint.
#include "options/changed_options.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace troupe {
namespace {

using Lines = std::vector<std::string>;

Options trained() {
  Options options;
  options.command = Command::train;
  options.lr = 0.1;
  options.train_iters = 10;
  return options;
}

TEST(ChangedOptions, NamesWhatMakesAnotherRun) {
  const std::string before = to_json(trained());
  EXPECT_EQ(changed_option_lines(before, trained()), Lines{});
  struct Case {
    void (*change)(Options&);
    std::string line;
  };
  const std::vector<Case> cases = {
      {[](Options& o) { o.clip_grad = 0.5; }, "--clip-grad 1.0 -> 0.5"},
      {[](Options& o) { o.adam_beta1 = 0.5; }, "--adam-beta1 0.9 -> 0.5"},
      {[](Options& o) { o.adam_beta2 = 0.5; }, "--adam-beta2 0.999 -> 0.5"},
      {[](Options& o) { o.adam_eps = 0.5; }, "--adam-eps 1e-08 -> 0.5"},
      {[](Options& o) { o.eod_mask_loss = true; }, "--eod-mask-loss false -> true"},
      {[](Options& o) { o.reset_attention_mask = true; }, "--reset-attention-mask false -> true"},
      {[](Options& o) { o.calculate_per_token_loss = true; },
       "--calculate-per-token-loss false -> true"},
      {[](Options& o) { o.weight_decay = 0.5; }, "--weight-decay 0.01 -> 0.5"},
      {[](Options& o) { o.global_batch_size = 8; }, "--global-batch-size not given -> 8"},
      {[](Options& o) { o.moe_router_ignore_padding = true; },
       "--moe-router-ignore-padding false -> true"},
      {[](Options& o) { o.exp_avg_dtype = DType::f8e4m3; }, "--exp-avg-dtype fp32 -> fp8"},
      {[](Options& o) { o.exp_avg_sq_dtype = DType::bf16; }, "--exp-avg-sq-dtype fp32 -> bf16"},
      {[](Options& o) { o.main_grads_dtype = DType::bf16; }, "--main-grads-dtype fp32 -> bf16"},
      {[](Options& o) { o.grad_reduce_in_bf16 = true; }, "--grad-reduce-in-bf16 false -> true"},
  };
  for (const Case& each : cases) {
    Options now = trained();
    each.change(now);
    EXPECT_EQ(changed_option_lines(before, now),
              Lines{"Warning: changed since the checkpoint: " + each.line});
  }
}

TEST(ChangedOptions, LeavesOutWhatChangesNoNumber) {
  Options now = trained();
  now.save = "elsewhere";
  now.save_interval = 3;
  now.log_interval = 5;
  now.train_iters = 20;
  now.quiet = true;
  now.threads = 3;
  now.eval_interval = 2;
  now.data_path = {"moved"};
  EXPECT_EQ(changed_option_lines(to_json(trained()), now), Lines{});
  now.ranks = 2;
  EXPECT_EQ(changed_option_lines(to_json(trained()), now),
            Lines{"changed since the checkpoint: --ranks 1 -> 2 (other rounding at most)"});
}

TEST(ChangedOptions, TheCheckpointsSchedulesMayHold) {
  Options now = trained();
  now.lr = 0.5;
  EXPECT_EQ(changed_option_lines(to_json(trained()), now),
            Lines{"Warning: changed since the checkpoint: --lr 0.1 -> 0.5"});
  now.use_checkpoint_opt_param_scheduler = true;
  EXPECT_EQ(changed_option_lines(to_json(trained()), now), Lines{});
}

TEST(ChangedOptions, ReadsOtherVersions) {
  auto before = nlohmann::json::parse(to_json(trained()));
  before["an-option-of-tomorrow"] = 3;
  before.erase("clip-grad");
  EXPECT_EQ(changed_option_lines(before.dump(), trained()), Lines{});
  Options now = trained();
  now.clip_grad = 0.5;
  EXPECT_EQ(changed_option_lines(before.dump(), now),
            Lines{"Warning: changed since the checkpoint: --clip-grad 1.0 -> 0.5"});
  EXPECT_EQ(changed_option_lines(R"({"lr":0.001})", now), Lines{});
}

}  // namespace
}  // namespace troupe
