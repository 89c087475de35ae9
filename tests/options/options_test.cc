// The option table keeps its own rules, and options survive the way into a file and back.
#include "options/options.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "options/check_options.h"
#include "options/device_options.h"
#include "passes/pass_pipeline.h"
#include "runtime/device_memory.h"
#include "support/errors.h"

namespace troupe {
namespace {

using testing::message_of;

const OptionSpec& spec_named(std::string_view name) {
  for (const OptionSpec& spec : option_table()) {
    if (spec.name == name) return spec;
  }
  ADD_FAILURE() << "no option " << name;
  return option_table().front();
}

// A value that differs from the default and that the option takes.
std::string other_value(const OptionSpec& spec) {
  if (!needs_value(spec)) return "true";
  if (!choices_of(spec).empty()) return std::string(choices_of(spec).back());
  const OptionRange& range = spec.range;
  return range.max <= 1 ? "0.25" : "7";
}

// Options of `command` with every option set to something else than its default.
Options all_set(Command command) {
  Options options;
  options.command = command;
  for (const OptionSpec& spec : option_table()) {
    if (takes(command, spec)) set_option(options, spec, other_value(spec));
  }
  return options;
}

TEST(OptionTable, NamesAreUnique) {
  std::set<std::string_view> names;
  for (const OptionSpec& spec : option_table()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name << " stands twice in the table";
  }
  EXPECT_FALSE(names.contains("help")) << "every command has --help already";
  EXPECT_FALSE(names.contains("command")) << "the saved JSON uses this name for the command";
}

TEST(OptionTable, EachMemberIsBoundOnce) {
  std::vector<const OptionSpec*> seen;
  for (const OptionSpec& spec : option_table()) {
    if (!spec.shorthand.empty()) continue;
    for (const OptionSpec* other : seen) {
      EXPECT_FALSE(other->member == spec.member)
          << spec.name << " and " << other->name << " are the same member";
    }
    seen.push_back(&spec);
  }
}

TEST(OptionTable, DefaultsAreAllowedValues) {
  for (const OptionSpec& spec : option_table()) {
    if (!spec.shorthand.empty()) continue;
    Options options;
    const std::string text = value_text(options, spec);
    if (text.empty()) continue;
    EXPECT_NO_THROW(set_option(options, spec, text)) << spec.name << " has the default " << text;
    EXPECT_EQ(value_text(options, spec), text) << spec.name;
  }
}

TEST(OptionTable, ShorthandsSetAllowedValues) {
  for (const OptionSpec& spec : option_table()) {
    if (spec.shorthand.empty()) continue;
    Options options;
    set_option(options, spec, "true");
    EXPECT_EQ(value_text(options, spec), spec.shorthand) << spec.name;
    for (const OptionSpec& full : option_table()) {
      if (full.shorthand.empty() && full.member == spec.member) {
        EXPECT_NO_THROW(set_option(options, full, spec.shorthand)) << spec.name;
        EXPECT_EQ(spec.commands, full.commands) << spec.name << " and " << full.name;
      }
    }
  }
}

TEST(OptionTable, EveryOptionIsComplete) {
  for (const OptionSpec& spec : option_table()) {
    EXPECT_FALSE(spec.name.empty());
    EXPECT_FALSE(spec.group.empty()) << spec.name;
    EXPECT_NE(spec.commands, 0U) << spec.name << " belongs to no command";
    EXPECT_EQ(spec.required & ~spec.commands, 0U)
        << spec.name << " is required by a command that does not take it";
    EXPECT_TRUE(spec.help.ends_with('.')) << spec.name << ": help is a sentence";
    EXPECT_EQ(needs_value(spec), !spec.metavar.empty()) << spec.name;
  }
}

TEST(OptionTable, ListsTakeTheirChoicesAlone) {
  Options options;
  const OptionSpec& spec = spec_named("moe-router-load-balancing-type");
  set_option(options, spec, "seq_aux_loss");
  set_option(options, spec, "aux_loss");
  EXPECT_EQ(value_text(options, spec), "seq_aux_loss aux_loss");
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { set_option(options, spec, "aux_losses"); }),
            "--moe-router-load-balancing-type takes aux_loss, seq_aux_loss, global_aux_loss, "
            "sinkhorn or none, not 'aux_losses'.");
}

TEST(OptionTable, KnowsThePasses) {
  std::vector<std::string_view> dumped;
  std::vector<std::string_view> skipped;
  for (const PassInfo& pass : all_passes()) {
    dumped.push_back(pass.name);
    // Without emission there is nothing, and without precision there are other numbers.
    const bool stays = pass.id == PassId::emission || pass.id == PassId::precision;
    if (!stays) skipped.push_back(pass.name);
    Options options;
    set_option(options, spec_named("dump-after"), pass.name);
    EXPECT_EQ(options.dump_after, pass.id) << pass.name;
  }
  EXPECT_TRUE(std::ranges::equal(choices_of(spec_named("dump-after")), dumped));
  EXPECT_TRUE(std::ranges::equal(choices_of(spec_named("skip-passes")), skipped));
}

TEST(OptionTable, GroupsStandTogether) {
  std::set<std::string_view> finished;
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (spec.group == group) continue;
    EXPECT_TRUE(finished.insert(spec.group).second) << spec.group << " is in two pieces";
    group = spec.group;
  }
}

TEST(OptionTable, EveryCommandIsListedOnce) {
  std::set<std::string_view> names;
  std::set<Command> commands;
  for (const CommandInfo& info : command_table()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_TRUE(commands.insert(info.command).second) << info.name;
    EXPECT_EQ(&info_of(info.command), &info);
  }
}

TEST(SetOption, NumbersAreReadWhole) {
  Options options;
  set_option(options, spec_named("lr"), "3e-4");
  EXPECT_EQ(options.lr, 3e-4);
  set_option(options, spec_named("seed"), "9223372036854775807");
  EXPECT_EQ(options.seed, INT64_MAX);
  for (const char* text : {"", "x", "1e3", "1.5", "0x10", "7 ", " 7", "1,000"}) {
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { set_option(options, spec_named("seed"), text); });
    EXPECT_NE(message.find("--seed takes a whole number, at least 0"), std::string::npos)
        << "for '" << text << "': " << message;
  }
}

TEST(SetOption, RangesAreKept) {
  Options options;
  const auto refused = [&](std::string_view name, std::string_view text) {
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { set_option(options, spec_named(name), text); });
    EXPECT_NE(message.find(flag_of(spec_named(name))), std::string::npos) << message;
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  refused("micro-batch-size", "0");
  refused("micro-batch-size", "2147483648");
  refused("seed", "9223372036854775808");
  refused("lr", "-1e-3");
  refused("lr", "nan");
  refused("lr", "inf");
  refused("lr", "1e999");
  refused("adam-eps", "0");
  refused("adam-beta1", "1");
  refused("top-p", "1.01");
  set_option(options, spec_named("adam-beta1"), "0");
  set_option(options, spec_named("top-p"), "1");
  EXPECT_EQ(options.adam_beta1, 0.0);
  EXPECT_EQ(options.top_p, 1.0);
}

TEST(SetOption, ChoicesAndSwitches) {
  Options options;
  EXPECT_EQ(message_of(ExitStatus::bad_request,
                       [&] { set_option(options, spec_named("weight-decay-incr-style"), "wsd"); }),
            "--weight-decay-incr-style takes constant, linear or cosine, not 'wsd'.");
  set_option(options, spec_named("qk-layernorm"), "false");
  EXPECT_EQ(options.qk_layernorm, false);
  EXPECT_EQ(message_of(ExitStatus::bad_request,
                       [&] { set_option(options, spec_named("qk-layernorm"), "maybe"); }),
            "--qk-layernorm takes no value, or =true or =false, not 'maybe'.");
}

TEST(OptionsJson, EveryOptionOfEveryCommandSurvives) {
  for (const CommandInfo& info : command_table()) {
    for (const bool set : {false, true}) {
      Options options;
      options.command = info.command;
      if (set) options = all_set(info.command);
      const std::string json = to_json(options);
      // What stands in the target before must not shine through.
      Options read = set ? Options{} : all_set(info.command);
      from_json(read, json, "options.json");
      EXPECT_EQ(read.command, info.command);
      for (const OptionDifference& difference : differences(options, read)) {
        ADD_FAILURE() << info.name << ": " << difference.spec->name << " was '" << difference.before
                      << "', came back as '" << difference.after << "'";
      }
      EXPECT_EQ(to_json(read), json);
    }
  }
}

TEST(OptionsJson, NumbersKeepEveryBit) {
  Options options;
  options.command = Command::train;
  options.lr = 0.1 + 0.2;
  options.adam_eps = 4.9406564584124654e-324;
  options.seed = INT64_MAX;
  Options read;
  from_json(read, to_json(options), "options.json");
  EXPECT_EQ(read.lr, options.lr);
  EXPECT_EQ(read.adam_eps, options.adam_eps);
  EXPECT_EQ(read.seed, options.seed);
}

// Checkpoints hold them.
TEST(OptionsJson, ValuesAreSavedByTheirNames) {
  const std::string saved =
      R"({"command": "train", "compute-dtype": "bf16", "activation": "geglu-tanh",
          "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"], "normalization": "",
          "recompute-granularity": "", "lr-decay-style": "WSD", "pipeline-schedule": "zb-v"})";
  Options options;
  options.normalization = Normalization::layer_norm;
  from_json(options, saved, "options.json");
  EXPECT_EQ(options.compute_dtype, DType::bf16);
  EXPECT_EQ(options.activation, (MlpActivation{ActivationFunction::gelu_tanh, /*gated=*/true}));
  EXPECT_EQ(options.moe_router_load_balancing_type,
            (std::vector{LoadBalancing::aux_loss, LoadBalancing::seq_aux_loss}));
  EXPECT_EQ(options.normalization, std::nullopt);
  EXPECT_EQ(options.recompute_granularity, std::nullopt);
  EXPECT_EQ(options.lr_decay_style, LrDecayStyle::wsd);
  EXPECT_EQ(options.pipeline_schedule, PipelineSchedule::zb_v);
  const std::string json = to_json(options);
  for (const char* text : {"\"normalization\": \"\"", "\"pipeline-schedule\": \"zb-v\""}) {
    EXPECT_NE(json.find(text), std::string::npos) << text << " is not in " << json;
  }
}

TEST(OptionsJson, ForeignTextIsRefused) {
  for (const char* text :
       {"", "[]", "{\"command\": \"fly\"}", "{\"no-such-option\": 1}", "{\"lr\": \"1e-3\"}",
        "{\"lr\": -1}", "{\"micro-batch-size\": 1.5}", "{\"micro-batch-size\": null}",
        "{\"json\": \"true\"}", "{\"json\": 1}", "{\"input\": \"a.txt\"}", "{\"input\": [1]}",
        "{\"bf16\": true}", "{\"save\": 3}", "{\"compute-dtype\": \"fp8\"}"}) {
    Options options;
    const std::string message =
        message_of(ExitStatus::failed, [&] { from_json(options, text, "run/options.json"); });
    EXPECT_NE(message.find("run/options.json"), std::string::npos) << text << ": " << message;
  }
}

TEST(OptionDifferences, NameWhatDiffers) {
  Options before;
  before.command = Command::train;
  Options after = before;
  EXPECT_TRUE(differences(before, after).empty());
  after.lr = 1e-3;
  after.clip_grad = 0.5;
  after.prompt = "not an option of train";
  const std::vector<OptionDifference> found = differences(before, after);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].spec->name, "lr");
  EXPECT_EQ(found[0].before, "");
  EXPECT_EQ(found[0].after, "0.001");
  EXPECT_EQ(found[1].spec->name, "clip-grad");
}

TEST(Describe, ShowsEveryOptionAndMarksChanges) {
  Options options;
  options.command = Command::train;
  options.lr = 1e-3;
  const std::string text = describe(options);
  for (const OptionSpec& spec : option_table()) {
    if (takes(Command::train, spec) && spec.shorthand.empty()) {
      EXPECT_NE(text.find(" " + flag_of(spec) + " "), std::string::npos) << spec.name;
    }
  }
  EXPECT_NE(text.find("* --lr "), std::string::npos) << text;
  EXPECT_EQ(text.find("* --min-lr "), std::string::npos) << text;
  EXPECT_EQ(text.find("--prompt"), std::string::npos) << text;
}

TEST(CheckOptions, RefusesContradictions) {
  const auto refused = [](const auto& change, std::string_view part) {
    Options options;
    options.command = Command::train;
    change(options);
    const std::string message =
        message_of(ExitStatus::bad_request, [&] { check_options(options); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  if (!has_cuda()) refused([](Options& o) { o.device = Device::cuda; }, "no CUDA");
  if (has_cuda()) {
    refused(
        [](Options& o) {
          o.device = Device::cuda;
          o.ranks = 2;
          o.ranks_per_gpu = 2;
          o.profile = true;
        },
        "cannot be told apart");
  }
  refused([](Options& o) { o.rank = 1; }, "--rank 1");
  refused(
      [](Options& o) {
        o.command = Command::doctor;
        o.ranks = 4;
      },
      "--ranks 4: troupe doctor");
  refused(
      [](Options& o) {
        o.ranks = 4;
        o.global_batch_size = 6;
      },
      "--global-batch-size 6");
  refused(
      [](Options& o) {
        o.micro_batch_size = 4;
        o.global_batch_size = 6;
      },
      "--global-batch-size 6");
  refused(
      [](Options& o) {
        o.lr = 1e-3;
        o.min_lr = 1e-2;
      },
      "--min-lr 0.01");
  refused(
      [](Options& o) {
        o.train_iters = 10;
        o.lr_warmup_iters = 10;
      },
      "--lr-warmup-iters 10");
  // The numbers of samples and tokens would not fit in 64 bits.
  refused([](Options& o) { o.train_iters = INT64_MAX; }, "--train-iters 9223372036854775807");
  refused(
      [](Options& o) {
        o.global_batch_size = 1 << 20;
        o.lr_decay_iters = int64_t{1} << 20;
      },
      "--lr-decay-iters 1048576 with steps of 1048576 sequences");
  refused([](Options& o) { o.lr_warmup_iters = int64_t{1} << 60; }, "--lr-warmup-iters");
  refused([](Options& o) { o.finetune = true; }, "--finetune");
  refused(
      [](Options& o) {
        o.no_save = true;
        o.save = "run";
      },
      "--save and --no-save exclude each other");
  refused(
      [](Options& o) {
        o.no_save = true;
        o.save_interval = 5;
      },
      "--save-interval and --no-save");
  refused(
      [](Options& o) {
        o.no_save = true;
        o.keep_checkpoints = 5;
      },
      "--keep-checkpoints and --no-save");
  refused(
      [](Options& o) {
        o.no_save = true;
        o.save_best = true;
      },
      "--save-best and --no-save");
  refused(
      [](Options& o) {
        o.no_save = true;
        o.save_retain_interval = 5;
      },
      "--save-retain-interval and --no-save");
  refused(
      [](Options& o) {
        o.save_best = true;
        o.save = "run";
      },
      "--eval-interval N");
  refused([](Options& o) { o.moe_upcycling_granularity = 2; },
          "--moe-upcycling-granularity needs --moe-use-upcycling");
  refused([](Options& o) { o.moe_use_upcycling = true; },
          "--moe-use-upcycling starts from a dense model, which is missing");
  refused([](Options& o) { o.hardware = "abacus"; }, "abacus");
  refused(
      [](Options& o) {
        o.command = Command::convert;
        o.tensor_model_parallel_size = 2;
      },
      "--tensor-model-parallel-size 2: troupe convert works with one rank");
  refused([](Options& o) { o.ckpt_step = 5; }, "--ckpt-step needs --load");
  refused([](Options& o) { o.use_checkpoint_args = true; }, "--use-checkpoint-args needs --load");
  refused([](Options& o) { o.allow_changed_data = true; }, "--allow-changed-data needs --load");
  refused(
      [](Options& o) {
        o.override_opt_param_scheduler = true;
        o.use_checkpoint_opt_param_scheduler = true;
      },
      "exclude each other");
  refused([](Options&) {}, "--train-iters N or --train-samples N");
  refused([](Options& o) { o.command = Command::eval; }, "eval needs --data-path PREFIX");
  refused(
      [](Options& o) {
        o.command = Command::eval;
        o.eval_iters = 0;
      },
      "--eval-iters 0: troupe eval evaluates at least one batch");
  refused(
      [](Options& o) {
        o.command = Command::tokenize;
        o.tokenizer_type = "Llama2Tokenizer";
      },
      "--tokenizer-type Llama2Tokenizer: Megatron's begins every document with a BOS token");
  refused([](Options& o) { o.ranks = kMostThreadRanks + 1; }, "--ranks 1025: at most 1024 ranks");
  refused(
      [](Options& o) {
        o.ranks = 2;
        o.micro_batch_size = 1 << 30;
      },
      "--micro-batch-size 1073741824 times --ranks 2 is more than a step holds");
  EXPECT_NO_THROW(check_options(Options{}));
  Options harmless;
  harmless.no_load_optim = harmless.no_load_rng = true;
  EXPECT_NO_THROW(check_options(harmless)) << "without --load there is nothing to leave out";
}

TEST(ThreadCount, ZeroMeansEveryUsableCore) {
  Options options;
  EXPECT_GE(device_spec_of(options).thread_count(), 1);
  options.threads = 3;
  EXPECT_EQ(device_spec_of(options).thread_count(), 3);
}

}  // namespace
}  // namespace troupe
