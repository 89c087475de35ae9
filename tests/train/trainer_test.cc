// Whole runs of a tiny model: schedules as they are logged, batch sizes that change, stopping and
// going on to the same bits, skipped steps, several evaluation sets, and which checkpoints stay.
#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/random.h"
#include "data/indexed_dataset.h"
#include "io/folder_lock.h"
#include "model/model.h"
#include "options/command_line.h"
#include "options/model_options.h"
#include "options/schedule_options.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;
using nlohmann::json;
using Arguments = std::vector<std::string>;

constexpr const char* kConfig = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 272,
  "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
  "head_dim": 8, "max_position_embeddings": 16, "moe_intermediate_size": 16, "num_experts": 4,
  "num_experts_per_tok": 2, "norm_topk_prob": true, "router_aux_loss_coef": 0.01})";

class TrainerRun : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = std::make_unique<TempFolder>();
    std::ofstream(*folder / "config.json") << kConfig;
    write_data("corpus", 40);
    write_data("books", 6);
    write_data("news", 5);
  }
  static void TearDownTestSuite() { folder.reset(); }

  static void write_data(const std::string& name, int documents) {
    IndexedDatasetWriter writer(*folder / name, TokenType::u16, false);
    for (int document = 0; document < documents; ++document) {
      std::vector<int32_t> tokens;
      for (uint64_t i = 0; i < 60; ++i) {
        const auto salt = static_cast<uint32_t>(document) + static_cast<uint32_t>(name.size()) * 99;
        tokens.push_back(
            static_cast<int32_t>('a' + random_below(8, 5, RandomStream::test, salt, i)));
      }
      writer.append(tokens);
      writer.end_sequence();
      writer.end_document();
    }
    writer.finish();
  }

  // 40 documents of 60 tokens, one of which is a z.
  static void write_marked_data(const std::string& name) {
    IndexedDatasetWriter writer(*folder / name, TokenType::u16, true);
    for (int32_t document = 0; document < 40; ++document) {
      std::vector<int32_t> tokens(60);
      for (int32_t i = 0; i < 60; ++i) {
        tokens[static_cast<size_t>(i)] = 'a' + (i * i + document) % 7;
      }
      if (document == 4) tokens[30] = 'z';
      writer.append(tokens);
      writer.end_sequence();
      writer.end_document();
    }
    writer.finish();
  }

  void SetUp() override {
    save = *folder / ::testing::UnitTest::GetInstance()->current_test_info()->name();
  }

  static Options options_of(const Arguments& more, const std::string& lr = "1e-2") {
    Arguments arguments = {
        "train",   "--quiet", "--model",     *folder / "config.json", "--lr",      lr,
        "--split", "80,20,0", "--data-path", *folder / "corpus",      "--threads", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return parse_command_line(arguments).options;
  }
  static ExitStatus train(const Arguments& more, const std::string& lr = "1e-2") {
    return troupe::train(options_of(more, lr));
  }

  static std::string refusal(const Arguments& more) {
    try {
      train(more);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  }

  static std::vector<json> lines(const std::string& run) {
    std::ifstream in(run + "/metrics.jsonl");
    std::vector<json> all;
    for (std::string line; std::getline(in, line);) {
      if (json entry = json::parse(line); !entry.contains("header")) all.push_back(entry);
    }
    return all;
  }
  // Of the training lines, in their order.
  static std::vector<double> logged(const std::string& run, const char* name) {
    std::vector<double> values;
    for (const json& line : lines(run)) {
      if (line.contains("loss")) {
        values.push_back(line.at(name).is_null() ? std::nan("") : line.at(name).get<double>());
      }
    }
    return values;
  }
  // Of the lines of evaluations, in their order.
  static std::vector<double> evaluated(const std::string& run, const char* name) {
    std::vector<double> values;
    for (const json& line : lines(run)) {
      if (line.contains("val_loss")) values.push_back(line.at(name).get<double>());
    }
    return values;
  }
  static std::vector<int64_t> checkpoints(const std::string& run) {
    std::vector<int64_t> steps;
    for (const CheckpointInfo& info : list_checkpoints(run)) steps.push_back(info.step);
    return steps;
  }
  static json training(const std::string& run) {
    return json::parse(Checkpoint::open(newest_checkpoint(run)->path).training());
  }
  // Hashes of all tensors of the newest checkpoint, and its position.
  static std::string content(const std::string& run) {
    const Checkpoint checkpoint = Checkpoint::open(newest_checkpoint(run)->path);
    std::string text = training(run).at("position").dump();
    for (const StoredTensor& tensor : checkpoint.tensors()) {
      for (const StoredSlice& slice : tensor.slices) {
        text += "\n" + tensor.name + " " + std::to_string(slice.hash);
      }
    }
    return text;
  }

  // A checkpoint of the run that `options` describe, with the weights that `change` makes of
  // initial ones.
  static void save_weights(const std::string& run, const Options& options,
                           const TrainingPosition& position,
                           const std::function<void(const Parameter&, const TensorView&)>& change) {
    RunIdentity identity;
    identity.model = load_model_config(options);
    identity.seed = static_cast<uint64_t>(options.seed);
    identity.sequence = 16;
    identity.split = options.split;
    identity.schedules = make_schedules(options);
    identity.ordered_samples = *options.train_iters;
    identity.data = "40 sequences, 2400 tokens";
    identity.options_json = to_json(options);
    ThreadPool pool(1);
    const ModelState state = declare_model_state(identity.model, DType::f32, /*trained=*/true);
    const StateStorage storage(state.table);
    initialize_parameters(state, storage, 1, pool);
    for (const Parameter& parameter : state.parameters) {
      change(parameter, storage.view(parameter.value));
    }
    save_training_checkpoint(run, identity, position, state, storage);
  }
  // With `value` among the weights of a layer.
  static void save_broken_weights(const std::string& run, const Options& options,
                                  const TrainingPosition& position, double value) {
    save_weights(run, options, position, [&](const Parameter& parameter, const TensorView& view) {
      if (parameter.layer == 0) set_element(view, 0, value);
    });
  }

  static std::unique_ptr<TempFolder> folder;
  std::string save;
};

std::unique_ptr<TempFolder> TrainerRun::folder;

const Arguments kRamp = {
    "--train-samples", "60", "--global-batch-size", "6", "--rampup-batch-size", "2", "2", "20"};

Arguments operator+(Arguments left, const Arguments& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

TEST_F(TrainerRun, RampGrowsTheBatch) {
  EXPECT_EQ(train(kRamp + Arguments{"--save", save}), ExitStatus::done);
  // 2 up to sample 10, 4 up to 20 (the step from 18 ends at 22), then 6; 2 samples remain.
  EXPECT_EQ(logged(save, "batch_size"),
            (std::vector<double>{2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 6, 6, 6, 6}));
  EXPECT_EQ(logged(save, "tokens").back(), 58 * 16);
  EXPECT_EQ(training(save).at("ordered_samples"), 60) << "what was asked for, as in Megatron";
  // Linear decay over the 60 samples.
  const std::vector<double> rates = logged(save, "lr");
  EXPECT_DOUBLE_EQ(rates[0], 1e-2 * 58 / 60);
  EXPECT_DOUBLE_EQ(rates[7], 1e-2 * 38 / 60);
  EXPECT_DOUBLE_EQ(rates.back(), 1e-2 * 2 / 60);
}

TEST_F(TrainerRun, AStepDoesNotDependOnTheProgramItRanIn) {
  // All steps of one size, once from a schedule and once from a program that had another size
  // before.
  const Arguments common = {"--train-samples", "12", "--seed", "5"};
  EXPECT_EQ(train(common + Arguments{"--global-batch-size", "4", "--save", save}),
            ExitStatus::done);
  EXPECT_EQ(train(common +
                  Arguments{"--step-batch-size-schedule", "0:4 176:6", "--save", save + "_steps"}),
            ExitStatus::done);
  EXPECT_EQ(logged(save + "_steps", "batch_size"), (std::vector<double>{4, 4, 4}));
  EXPECT_EQ(content(save + "_steps"), content(save)) << "176 tokens are 11 samples";
}

TEST_F(TrainerRun, StoppedAnywhereInTheRampItEndsInTheSameBits) {
  const Arguments run = kRamp + Arguments{"--lr-decay-style",
                                          "WSD",
                                          "--lr-wsd-decay-samples",
                                          "24",
                                          "--lr-warmup-samples",
                                          "8",
                                          "--min-lr",
                                          "1e-4",
                                          "--start-weight-decay",
                                          "0.01",
                                          "--end-weight-decay",
                                          "0.1",
                                          "--weight-decay-incr-style",
                                          "cosine",
                                          "--eval-interval",
                                          "4",
                                          "--eval-iters",
                                          "1"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  const std::string cut = save + "_cut";
  // Within the warm-up, at the first change of size, in the middle stage, around the begin of the
  // fall (sample 36: steps 10 and 11), in it.
  for (const char* step : {"3", "5", "6", "8", "10", "11", "13"}) {
    EXPECT_EQ(train(run + Arguments{"--save", cut, "--load", cut, "--exit-after-step", step}),
              ExitStatus::done);
  }
  EXPECT_EQ(train(run + Arguments{"--save", cut, "--load", cut}), ExitStatus::done);
  EXPECT_EQ(content(cut), content(save));
  for (const char* name : {"lr", "loss", "batch_size", "weight_decay", "grad_norm", "tokens"}) {
    EXPECT_EQ(logged(cut, name), logged(save, name)) << name;
  }
  EXPECT_EQ(training(cut).at("best"), training(save).at("best"));
}

// The steps beside those that are left out see the samples that they would have seen, and the
// schedules do not move in a step that is left out.
TEST_F(TrainerRun, StepsMayBeLeftOut) {
  const Arguments run = {"--train-iters",   "6", "--lr-warmup-iters", "4",
                         "--eval-interval", "2", "--eval-iters",      "1"};
  EXPECT_EQ(train(run + Arguments{"--save", save + "_all"}), ExitStatus::done);
  const Arguments some = run + Arguments{"--iterations-to-skip", "2", "3", "--save", save};
  EXPECT_EQ(train(some), ExitStatus::done);
  EXPECT_EQ(logged(save, "step"), (std::vector<double>{1, 4, 5, 6}));
  const std::vector<double> rates = logged(save + "_all", "lr");
  EXPECT_EQ(logged(save, "lr"), (std::vector<double>{rates[0], rates[1], rates[2], rates[3]}));
  EXPECT_EQ(logged(save, "tokens").back(), logged(save + "_all", "tokens").back());
  EXPECT_EQ(evaluated(save, "val_loss").size(), 3U) << "before, and after steps 4 and 6";
  // The end of a run is evaluated whether or not its last step is left out.
  EXPECT_EQ(train({"--train-iters", "3", "--eval-interval", "2", "--eval-iters", "1",
                   "--iterations-to-skip", "3", "--save", save + "_last"}),
            ExitStatus::done);
  EXPECT_EQ(evaluated(save + "_last", "step"), (std::vector<double>{0, 2, 3}));
  // Stopped where a step is left out, it goes on to the same bits.
  const std::string cut = save + "_cut";
  const Arguments same = run + Arguments{"--iterations-to-skip", "2", "3", "--save", cut};
  EXPECT_EQ(train(same + Arguments{"--exit-after-step", "2"}), ExitStatus::done);
  EXPECT_EQ(train(same + Arguments{"--load", cut}), ExitStatus::done);
  EXPECT_EQ(content(cut), content(save));
  EXPECT_NE(refusal({"--train-iters", "2", "--iterations-to-skip", "0"})
                .find("--iterations-to-skip \"0\""),
            std::string::npos);
}

TEST_F(TrainerRun, EvaluationsHaveBatchSizesOfTheirOwn) {
  const Arguments run = {"--train-iters",   "2", "--eval-interval", "2", "--valid-data-path",
                         *folder / "corpus"};
  EXPECT_EQ(train(run + Arguments{"--eval-iters", "4", "--save", save}), ExitStatus::done);
  EXPECT_EQ(train(run + Arguments{"--eval-iters", "1", "--eval-micro-batch-size", "2",
                                  "--eval-global-batch-size", "4", "--save", save + "_sizes"}),
            ExitStatus::done);
  EXPECT_EQ(evaluated(save + "_sizes", "val_tokens"), evaluated(save, "val_tokens"));
  EXPECT_NE(
      refusal(run + Arguments{"--eval-micro-batch-size", "2", "--eval-global-batch-size", "3"})
          .find("--eval-global-batch-size 3: it must be a multiple"),
      std::string::npos);
  EXPECT_EQ(train(run + Arguments{"--eval-iters", "0", "--save", save + "_none"}),
            ExitStatus::done);
  EXPECT_TRUE(evaluated(save + "_none", "val_loss").empty());
}

// What the folder's event files hold; names of curves are plain text in them.
std::string events_in(const std::string& folder) {
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    text += get_file(entry.path().string());
  }
  return text;
}

TEST_F(TrainerRun, MemoryAndTimersAreCurvesWhereTheyAreAskedFor) {
  const Arguments run = {"--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1"};
  const Arguments flags = {"--log-memory-to-tensorboard", "--log-timers-to-tensorboard"};
  EXPECT_EQ(train(run + Arguments{"--save", save, "--tensorboard-dir", save + "_plain"}),
            ExitStatus::done);
  EXPECT_EQ(
      train(run + flags + Arguments{"--save", save + "2", "--tensorboard-dir", save + "_all"}),
      ExitStatus::done);
  for (const char* name :
       {"mem-max-allocated-bytes", "batch-generator-time", "forward-backward-optimizer-time",
        "evaluate-time", "save-checkpoint-time"}) {
    EXPECT_EQ(events_in(save + "_plain").find(name), std::string::npos) << name;
    EXPECT_NE(events_in(save + "_all").find(name), std::string::npos) << name;
  }
}

// What a step does per second is what it did, over the time that is logged of it.
TEST_F(TrainerRun, RatesAreThoseOfTheTimeOfAStep) {
  for (const int ranks : {1, 2}) {
    const std::string run = save + std::to_string(ranks);
    const Arguments more = {
        "--train-iters", "2", "--global-batch-size", "6", "--ranks", std::to_string(ranks),
        "--save",        run};
    EXPECT_EQ(train(more), ExitStatus::done);
    const double flops = 6 * Model(load_model_config(options_of(more))).training_flops(16);
    const std::vector<double> seconds = logged(run, "step_time_s");
    const std::vector<double> tokens = logged(run, "tokens_per_s");
    const std::vector<double> tflops = logged(run, "tflops_per_gpu");
    ASSERT_EQ(seconds.size(), 2U);
    for (size_t i = 0; i < seconds.size(); ++i) {
      EXPECT_GT(seconds[i], 0);
      // A few roundings in double.
      EXPECT_NEAR(tokens[i] * seconds[i], 6 * 16, 1e-12 * 6 * 16);
      EXPECT_NEAR(tflops[i] * seconds[i] * ranks * 1e12, flops, 1e-12 * flops);
    }
  }
}

TEST_F(TrainerRun, EachSplitMayHaveDataOfItsOwn) {
  const std::string corpus = *folder / "corpus";
  const std::string books = *folder / "books";
  const std::string news = *folder / "news";
  const auto run = [&](const Arguments& data, const std::string& name) {
    Arguments arguments = {"train",         "--quiet", "--model",         *folder / "config.json",
                           "--lr",          "1e-2",    "--threads",       "1",
                           "--train-iters", "2",       "--eval-interval", "2",
                           "--eval-iters",  "2",       "--save",          save + name};
    arguments.insert(arguments.end(), data.begin(), data.end());
    EXPECT_EQ(troupe::train(parse_command_line(arguments).options), ExitStatus::done) << name;
  };
  const auto same = [&](const std::string& a, const std::string& b) {
    return logged(save + a, "loss") == logged(save + b, "loss") &&
           evaluated(save + a, "val_loss") == evaluated(save + b, "val_loss");
  };
  run({"--data-path", corpus, "--split", "1,0,0", "--valid-data-path", books}, "_share");
  run({"--train-data-path", corpus, "--valid-data-path", books, "--test-data-path", news}, "_own");
  EXPECT_TRUE(same("_share", "_own"));
  std::ofstream(*folder / "splits.json")
      << "{\"train\": [\"" + corpus + "\"], \"valid\": \"" + books + "\", \"test\": []}";
  run({"--per-split-data-args-path", *folder / "splits.json"}, "_file");
  EXPECT_TRUE(same("_share", "_file"));

  // Beside --train-data-path, several are one mixture; beside --data-path, sets of their own.
  run({"--train-data-path", corpus, "--valid-data-path", "1", books, "1", news}, "_mixed");
  for (const json& line : lines(save + "_mixed")) EXPECT_FALSE(line.contains("val_loss/books"));
  EXPECT_FALSE(same("_mixed", "_own"));
  run({"--train-data-path", corpus, "--valid-data-path", books, news, "--multiple-validation-sets"},
      "_sets");
  EXPECT_TRUE(same("_sets", "_own")) << "the first set counts";
  const std::vector<double> of_news = evaluated(save + "_sets", "val_loss/news");
  ASSERT_EQ(of_news.size(), 2U);

  // Once, by the weights at the end of the run; not of one that ends before.
  const auto tested = [&](const std::string& name) {
    std::vector<double> losses;
    for (const json& line : lines(save + name)) {
      if (line.contains("test_loss")) losses.push_back(line["test_loss"].get<double>());
    }
    return losses;
  };
  EXPECT_EQ(tested("_own"), std::vector<double>{of_news.back()});
  EXPECT_TRUE(tested("_file").empty());
  std::ofstream(*folder / "splits.json") << "{\"train\": [\"" + corpus + "\"], \"valid\": \"" +
                                                books + "\", \"test\": \"" + news + "\"}";
  run({"--per-split-data-args-path", *folder / "splits.json"}, "_tested");
  EXPECT_EQ(tested("_tested"), tested("_own"));
  run({"--data-path", corpus, "--test-data-path", news, "--exit-interval", "1"}, "_cut");
  EXPECT_TRUE(tested("_cut").empty());

  // The third share of --split, where it holds a micro-batch.
  run({"--data-path", corpus, "--split", "1,1,0"}, "_second");
  run({"--data-path", corpus, "--split", "1,0,1", "--valid-data-path", books}, "_third");
  EXPECT_TRUE(tested("_second").empty());
  EXPECT_EQ(tested("_third"), std::vector<double>{evaluated(save + "_second", "val_loss").back()});
  run({"--data-path", corpus, "--split", "1,0,1", "--valid-data-path", books,
       "--eval-micro-batch-size", "1000", "--eval-global-batch-size", "1000"},
      "_short");
  EXPECT_TRUE(tested("_short").empty());

  run({"--mock-data"}, "_mock");
  EXPECT_EQ(logged(save + "_mock", "loss").size(), 2U);
}

TEST_F(TrainerRun, OtherSchedulesNeedAWord) {
  EXPECT_EQ(train({"--train-iters", "4", "--exit-after-step", "2", "--save", save}),
            ExitStatus::done);
  const Arguments longer = {"--train-iters", "8", "--save", save, "--load", save};
  const std::string message = refusal(longer);
  EXPECT_NE(
      message.find("a decay of the learning rate (--lr-decay-iters; if unset, --train-iters) to "
                   "sample 4 instead of 8"),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("--override-opt_param-scheduler"), std::string::npos) << message;
  EXPECT_EQ(
      train(longer + Arguments{"--use-checkpoint-opt_param-scheduler", "--exit-after-step", "3"}),
      ExitStatus::done);
  EXPECT_DOUBLE_EQ(logged(save, "lr").at(2), 1e-2 * 1 / 4);
  EXPECT_EQ(train(longer + Arguments{"--override-opt_param-scheduler"}), ExitStatus::done);
  EXPECT_DOUBLE_EQ(logged(save, "lr").at(3), 1e-2 * 4 / 8);
  EXPECT_EQ(checkpoints(save).back(), 8);
}

TEST_F(TrainerRun, NewRunsDoNotStartFromWeightsThatAreNotFinite) {
  save_broken_weights(save + "_nan", options_of({"--train-iters", "20"}), {}, std::nan(""));
  const std::string message =
      refusal({"--train-iters", "20", "--save", save, "--pretrained-checkpoint", save + "_nan"});
  EXPECT_NE(message.find("layers.0.input_norm is not finite as f32"), std::string::npos) << message;
}

TEST_F(TrainerRun, StopsWhenTheFirstLossIsNotFinite) {
  // Each weight is finite, their products are not.
  save_broken_weights(save + "_huge", options_of({"--train-iters", "20"}), {}, 3e38);
  const std::string message =
      refusal({"--train-iters", "20", "--save", save, "--pretrained-checkpoint", save + "_huge",
               "--max-skipped-steps", "0"});
  EXPECT_EQ(message,
            "The loss of step 1 is nan, and no step has changed the weights yet: they are out of "
            "range from the start. Check where they come from, or lower --init-method-std. Nothing "
            "was saved.");
  EXPECT_TRUE(checkpoints(save).empty());
}

TEST_F(TrainerRun, StopsWhenGradientsStayNonFinite) {
  // As after one update that broke the weights.
  save_broken_weights(save + "_nan", options_of({"--train-iters", "20"}),
                      {.step = 1, .updates = 1, .consumed_samples = 1, .scheduled_samples = 1},
                      std::nan(""));
  const Arguments run = {"--train-iters",   "20", "--max-skipped-steps", "3",
                         "--save-interval", "1",  "--keep-checkpoints",  "1"};
  const std::string message = refusal(run + Arguments{"--save", save, "--load", save + "_nan"});
  EXPECT_EQ(
      message,
      "The gradients of the last 3 steps, up to step 4, are not finite (in the last one those "
      "of embedding, layers.0.input_norm, layers.0.w_qkv and 9 more): the run has diverged, "
      "and --max-skipped-steps ends it. Go on from an earlier checkpoint with a lower --lr. "
      "The checkpoint of step 3 is kept.");
  // Ranks name together what is not finite on any of them.
  EXPECT_EQ(refusal(run + Arguments{"--save", save + "_pp2", "--load", save + "_nan", "--ranks",
                                    "2", "--pipeline-model-parallel-size", "2",
                                    "--pipeline-model-parallel-layout", "Et|L"}),
            message);
  // Nothing is deleted while steps are skipped, and nothing saved at the end.
  EXPECT_EQ(checkpoints(save), (std::vector<int64_t>{2, 3}));
  const json position = training(save).at("position");
  EXPECT_EQ(position.at("skipped_in_row"), 2);
  EXPECT_EQ(position.at("consumed_samples"), 3);
  EXPECT_EQ(position.at("scheduled_samples"), 1) << "the schedules wait";
  // The count goes on where it was.
  EXPECT_TRUE(refusal(run + Arguments{"--save", save, "--load", save})
                  .starts_with("The gradients of the last 3 steps, up to step 4, are"));
  // Nor is a run a success that ends before there are three.
  const std::string short_run = save + "_short";
  const std::string at_the_end = refusal({"--train-iters", "3", "--override-opt-param-scheduler",
                                          "--load", save + "_nan", "--save", short_run});
  EXPECT_EQ(
      at_the_end,
      "All steps are done, but the loss of the last one is nan, and the updates of the last 2 "
      "were skipped: the run has diverged. Go on from an earlier checkpoint with a lower "
      "--lr. The checkpoint of step 3 is kept.");
  const std::string on = save + "_on";
  EXPECT_EQ(
      train({"--train-iters", "20", "--exit-after-step", "8", "--max-skipped-steps", "0",
             "--eval-interval", "2", "--eval-iters", "1", "--load", save + "_nan", "--save", on}),
      ExitStatus::done);
  EXPECT_FALSE(training(on).contains("best")) << "a loss that is not a number is not the best one";
}

// Megatron's grad_norm_skip_threshold: the weights stay, the data goes on.
TEST_F(TrainerRun, SkipsStepsWhoseGradientsAreTooLarge) {
  const Arguments more = {"--train-iters", "3",      "--grad-norm-skip-threshold",
                          "1e-9",          "--save", save};
  EXPECT_EQ(train(more), ExitStatus::done);
  EXPECT_EQ(training(save).at("position").at("updates"), 0);
  EXPECT_EQ(training(save).at("position").at("consumed_samples"), 3);
  for (const json& line : lines(save)) {
    if (line.contains("loss")) {
      EXPECT_TRUE(line.value("skipped", false)) << line;
    }
  }
  const std::string message = refusal({"--train-iters", "9", "--grad-norm-skip-threshold", "1e-9",
                                       "--max-skipped-steps", "4", "--save", save + "_again"});
  EXPECT_NE(message.find("last 4 steps"), std::string::npos) << message;
  EXPECT_NE(message.find("--grad-norm-skip-threshold"), std::string::npos) << message;
}

// Of one rank and of four that share the model in every way.
TEST_F(TrainerRun, LogsZerosOfGradientsAndTheNormOfWeights) {
  // The last step has a learning rate of 0.
  const Arguments more = {"--train-iters",           "3",
                          "--global-batch-size",     "4",
                          "--log-num-zeros-in-grad", "--log-params-norm",
                          "--decoupled-lr",          "1e-3"};
  ASSERT_EQ(train(more + Arguments{"--save", save}), ExitStatus::done);
  ASSERT_EQ(
      train(more + Arguments{"--save", save + "_ranks", "--ranks", "4",
                             "--tensor-model-parallel-size", "2", "--expert-model-parallel-size",
                             "2", "--expert-tensor-parallel-size", "1",
                             "--use-distributed-optimizer"}),
      ExitStatus::done);
  const std::vector<double> norms = logged(save, "params_norm");
  const std::vector<double> of_ranks = logged(save + "_ranks", "params_norm");
  ASSERT_EQ(norms.size(), 3U);
  ASSERT_EQ(of_ranks.size(), 3U);
  EXPECT_NE(norms[0], norms[1]);
  EXPECT_EQ(norms[1], norms[2]);
  for (size_t i = 0; i < 3; ++i) {
    // Weights in fp32 that differ in the last bits by the order of sums.
    EXPECT_NEAR(of_ranks[i], norms[i], 1e-5 * norms[i]);
    EXPECT_EQ(logged(save + "_ranks", "num_zeros")[i], logged(save, "num_zeros")[i]);
  }
  EXPECT_GT(logged(save, "num_zeros")[0], 0);
}

// At this rate no weight moves, so every layout has the same: keys and values that two ranks of TP
// hold, of which each has a shard of the master weights, count once.
TEST_F(TrainerRun, TheNormOfMasterWeightsIsThatOfOneRank) {
  const Arguments run = {"--train-iters",   "1",    "--global-batch-size", "4",
                         "--compute-dtype", "bf16", "--log-params-norm"};
  ASSERT_EQ(train(run + Arguments{"--save", save}, "1e-300"), ExitStatus::done);
  ASSERT_EQ(
      train(
          run + Arguments{"--save", save + "_ranks", "--ranks", "4", "--tensor-model-parallel-size",
                          "2", "--expert-tensor-parallel-size", "1", "--use-distributed-optimizer"},
          "1e-300"),
      ExitStatus::done);
  const double norm = logged(save, "params_norm").at(0);
  // Sums of some 10,000 squares in double, in two orders.
  EXPECT_NEAR(logged(save + "_ranks", "params_norm").at(0), norm, 1e-12 * norm);
}

// A skipped step is as if it had not been, except for the data that it has read: the schedule of
// the learning rate and Adam's step number wait.
TEST_F(TrainerRun, ASkippedStepLeavesTheScheduleAndTheStepNumberWhereTheyWere) {
  // One token of the data has an embedding that is not a number; one sample reads it.
  write_marked_data("marked");
  const auto options = [&](const Arguments& more) {
    return Arguments{"--train-iters", "40", "--data-path", *folder / "marked"} + more;
  };
  const auto save_marked = [&](const std::string& run, int64_t consumed) {
    save_weights(run, options_of({"--train-iters", "40"}),
                 {.step = 1, .updates = 1, .consumed_samples = consumed, .scheduled_samples = 1},
                 [](const Parameter& parameter, const TensorView& view) {
                   if (parameter.name != "embedding") return;
                   for (int64_t i = 0; i < 16; ++i) set_element(view, 'z' * 16 + i, std::nan(""));
                 });
  };
  const auto go_on = [&](const std::string& from, const std::string& to, const char* last) {
    EXPECT_EQ(train(options({"--load", from, "--save", to, "--exit-after-step", last,
                             "--max-skipped-steps", "0"})),
              ExitStatus::done);
  };
  save_marked(save + "_search", 0);
  EXPECT_EQ(train({"--train-iters", "110", "--override-opt_param-scheduler", "--data-path",
                   *folder / "marked", "--load", save + "_search", "--save", save + "_found",
                   "--max-skipped-steps", "0"}),
            ExitStatus::done);
  int64_t marked = -1;
  for (const json& line : lines(save + "_found")) {
    if (marked < 0 && line.contains("skipped")) marked = line.at("step").get<int64_t>() - 2;
  }
  ASSERT_GE(marked, 0) << "no step was skipped";
  ASSERT_LT(marked, 80) << "the order of the data is then another one";

  save_marked(save + "_before", marked);
  go_on(save + "_before", save + "_with", "3");
  save_marked(save + "_after", marked + 1);
  go_on(save + "_after", save + "_without", "2");
  ASSERT_TRUE(lines(save + "_with").at(0).contains("skipped"));
  EXPECT_EQ(logged(save + "_with", "lr").back(), logged(save + "_without", "lr").back());
  EXPECT_DOUBLE_EQ(logged(save + "_with", "lr").back(), 1e-2 * 38 / 40);
  const auto tensors = [](const std::string& text) { return text.substr(text.find('\n')); };
  EXPECT_EQ(tensors(content(save + "_with")), tensors(content(save + "_without")));
  EXPECT_EQ(training(save + "_with").at("position").at("updates"), 2);
}

// But not the random numbers: those of a skipped step are not drawn again.
TEST_F(TrainerRun, StepsAfterASkippedOneDrawOtherRandomNumbers) {
  IndexedDatasetWriter writer(*folder / "alike", TokenType::u16, true);
  for (int document = 0; document < 40; ++document) {
    writer.append(std::vector<int32_t>(60, 'a'));
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
  const auto losses = [&](const std::string& run, const char* dropout) {
    EXPECT_EQ(train({"--train-iters", "3", "--grad-norm-skip-threshold", "1e-9", "--data-path",
                     *folder / "alike", "--hidden-dropout", dropout, "--save", run}),
              ExitStatus::done);
    EXPECT_EQ(training(run).at("position").at("updates"), 0);
    return logged(run, "loss");
  };
  const std::vector<double> alike = losses(save + "_whole", "0");
  ASSERT_EQ(alike[0], alike[1]) << "the steps differ in more than their random numbers";
  const std::vector<double> drawn = losses(save + "_dropped", "0.5");
  EXPECT_NE(drawn[0], drawn[1]);
  EXPECT_NE(drawn[1], drawn[2]);
}

// A fresh optimizer has no moments, whatever the checkpoint has.
TEST_F(TrainerRun, FinetuningForgetsTheMoments) {
  const Arguments run = {"--train-iters", "4"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  EXPECT_EQ(train(run + Arguments{"--save", save + "_bare", "--no-save-optim"}), ExitStatus::done);
  for (const char* from : {"", "_bare"}) {
    EXPECT_EQ(train({"--train-iters", "1", "--finetune", "--load", save + from, "--save",
                     save + "_from" + from}),
              ExitStatus::done);
  }
  EXPECT_EQ(content(save + "_from"), content(save + "_from_bare"));
}

TEST_F(TrainerRun, GoesOnWithoutTheSavedOptimizer) {
  const Arguments run = {"--train-iters", "8",  "--compute-dtype", "bf16",
                         "--save",        save, "--load",          save};
  EXPECT_EQ(train(run + Arguments{"--no-save-optim", "--exit-after-step", "4"}), ExitStatus::done);
  const Checkpoint checkpoint = Checkpoint::open(newest_checkpoint(save)->path);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    EXPECT_NE(tensor.role, CheckpointRole::optimizer) << tensor.name;
  }
  const std::string message = refusal(run);
  EXPECT_NE(message.find("was saved without the optimizer's state (--no-save-optim). Give "
                         "--no-load-optim"),
            std::string::npos)
      << message;
  EXPECT_EQ(train(run + Arguments{"--no-load-optim", "--exit-after-step", "6"}), ExitStatus::done);
  const json position = training(save).at("position");
  EXPECT_EQ(position.at("step"), 6);
  EXPECT_EQ(position.at("consumed_samples"), 6);
  EXPECT_EQ(position.at("updates"), 2) << "Adam begins anew";
  EXPECT_EQ(position.at("scheduled_samples"), 2) << "and so does the schedule";
  EXPECT_DOUBLE_EQ(logged(save, "lr").at(4), 1e-2 * 7 / 8);
  // What it has saved now is whole again.
  EXPECT_EQ(train(run), ExitStatus::done);
  EXPECT_EQ(training(save).at("position").at("updates"), 4);
}

TEST_F(TrainerRun, GoesOnWithAnotherSeedWhereThatIsMeant) {
  const Arguments run = {"--train-iters", "4", "--save", save, "--load", save};
  EXPECT_EQ(train(run + Arguments{"--no-save-rng", "--exit-after-step", "1"}), ExitStatus::done);
  EXPECT_FALSE(training(save).contains("seed"));
  EXPECT_NE(refusal(run).find("was saved without its seed"), std::string::npos);
  EXPECT_EQ(train(run + Arguments{"--no-load-rng", "--exit-after-step", "2"}), ExitStatus::done);
  EXPECT_EQ(training(save).at("seed"), 1234);
  EXPECT_NE(refusal(run + Arguments{"--seed", "5"}).find("was saved with --seed 1234"),
            std::string::npos);
  EXPECT_EQ(train(run + Arguments{"--seed", "5", "--no-load-rng"}), ExitStatus::done);
}

TEST_F(TrainerRun, TakesTheModelFromTheCheckpoint) {
  const Arguments shape = {"--train-iters",   "4",    "--seq-length",         "8",
                           "--compute-dtype", "bf16", "--moe-aux-loss-coeff", "0.02"};
  EXPECT_EQ(train(shape + Arguments{"--save", save}), ExitStatus::done);
  const std::string cut = save + "_cut";
  EXPECT_EQ(train(shape + Arguments{"--save", cut, "--exit-after-step", "2"}), ExitStatus::done);
  const auto go_on = [&](const Arguments& more) {
    const Arguments bare = {"train",
                            "--quiet",
                            "--lr",
                            "1e-2",
                            "--split",
                            "80,20,0",
                            "--data-path",
                            *folder / "corpus",
                            "--threads",
                            "1",
                            "--train-iters",
                            "4",
                            "--save",
                            cut,
                            "--load",
                            cut,
                            "--use-checkpoint-args"};
    return troupe::train(parse_command_line(bare + more).options);
  };
  try {
    go_on({"--num-experts", "8"});
    ADD_FAILURE() << "another model was taken";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("num_experts: 4 saved, 8 now"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(go_on({}), ExitStatus::done);
  EXPECT_EQ(content(cut), content(save));
}

TEST_F(TrainerRun, SaysWhichOptionsHaveChanged) {
  const Arguments run = {"--train-iters", "4", "--save", save, "--load", save};
  EXPECT_EQ(train(run + Arguments{"--exit-after-step", "2"}), ExitStatus::done);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(train(run + Arguments{"--clip-grad", "0.5", "--adam-beta2", "0.9"}), ExitStatus::done);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "Warning: changed since the checkpoint: --adam-beta2 0.999 -> 0.9\n"
            "Warning: changed since the checkpoint: --clip-grad 1.0 -> 0.5\n");
}

TEST_F(TrainerRun, OtherTokensOfTheSameCountsNeedAWord) {
  const std::string data = *folder / "changing";
  write_data("changing", 40);
  const auto run = [&](const Arguments& more) {
    return Arguments{"--train-iters", "4", "--data-path", data, "--save", save, "--load", save} +
           more;
  };
  EXPECT_EQ(train(run({"--exit-after-step", "2"})), ExitStatus::done);
  const json hashes = training(save).at("data_hashes");
  ASSERT_EQ(hashes.size(), 1U);
  EXPECT_TRUE(hashes[0].contains("xxh3")) << "of small data at once";
  // One token of 2400 is another.
  std::fstream file(data + ".bin", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(2000);
  file.put('x');
  file.close();
  const std::string message = refusal(run({}));
  EXPECT_NE(message.find("as many tokens as when " + save), std::string::npos) << message;
  EXPECT_EQ(train(run({"--allow-changed-data", "--exit-after-step", "3"})), ExitStatus::done);
  EXPECT_NE(training(save).at("data_hashes"), hashes);
  EXPECT_EQ(train(run({})), ExitStatus::done) << "these are the run's data now";
}

TEST_F(TrainerRun, OtherWeightsOfTheSameDataAreWarnedOf) {
  const auto run = [&](const char* weight, const Arguments& more) {
    return Arguments{"--train-iters",
                     "4",
                     "--data-path",
                     weight,
                     *folder / "books",
                     "3",
                     *folder / "news",
                     "--save",
                     save,
                     "--load",
                     save} +
           more;
  };
  EXPECT_EQ(train(run("1", {"--exit-after-step", "2"})), ExitStatus::done);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(train(run("2", {})), ExitStatus::done);
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("Until now: 1 x 6 sequences, 360 tokens; 3 x 5 sequences, 300 tokens. "
                         "From here on: 2 x 6 sequences, 360 tokens; 3 x 5"),
            std::string::npos)
      << warning;
}

// What a run goes on from in one folder is saved in the other, also where nothing is left to do.
TEST_F(TrainerRun, AnotherFolderGetsACheckpointOfItsOwn) {
  const Arguments run = {"--train-iters", "2"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  EXPECT_EQ(train(run + Arguments{"--load", save, "--save", save + "_other"}), ExitStatus::done);
  EXPECT_EQ(checkpoints(save + "_other"), std::vector<int64_t>{2});
  EXPECT_EQ(content(save + "_other"), content(save));
}

// Whatever the clock says: with this limit it is always time.
TEST_F(TrainerRun, SavesByTheClockReplaceOneAnother) {
  const Arguments run = {"--train-iters", "7", "--save-interval", "3"};
  const Arguments always = {"--save-interval-minutes", "1e-9"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  EXPECT_EQ(train(run + always + Arguments{"--save", save + "_clock"}), ExitStatus::done);
  EXPECT_EQ(checkpoints(save), (std::vector<int64_t>{3, 6, 7}));
  EXPECT_EQ(checkpoints(save + "_clock"), checkpoints(save));
  EXPECT_EQ(content(save + "_clock"), content(save)) << "saving changes no bit";
  // Killed after step 5, it goes on from what the clock has saved, and that goes away.
  const std::string cut = save + "_cut";
  EXPECT_EQ(train(run + Arguments{"--save", cut, "--exit-after-step", "5"}), ExitStatus::done);
  EXPECT_EQ(checkpoints(cut), (std::vector<int64_t>{3, 5})) << "asked for: it stays";
  EXPECT_FALSE(training(cut).contains("by_clock"));
  EXPECT_EQ(train(run + Arguments{"--ranks", "2", "--global-batch-size", "2", "--save",
                                  save + "_ranks", "--save-interval-minutes", "1e-9"}),
            ExitStatus::done);
  EXPECT_EQ(checkpoints(save + "_ranks"), checkpoints(save));
}

TEST_F(TrainerRun, AFolderThatAnotherRunHoldsIsRefused) {
  const FolderLock lock(save);
  EXPECT_NE(refusal({"--train-iters", "1", "--save", save}).find("process "), std::string::npos);
}

TEST_F(TrainerRun, WarnsOfUnevenRouting) {
  const auto warnings = [](const Arguments& more) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(train(Arguments{"--train-iters", "4", "--log-interval", "2"} + more),
              ExitStatus::done);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warnings({}), "") << "only on request";
  // Loads are never exactly even here, and no router's entropy is exactly the largest.
  const std::string uneven = warnings({"--warn-load-imbalance", "1.0001"});
  EXPECT_NE(uneven.find(" Warning: step 2, layer 0: the busiest expert gets "), std::string::npos)
      << uneven;
  EXPECT_EQ(std::count(uneven.begin(), uneven.end(), '\n'), 1) << "reported once: " << uneven;
  EXPECT_NE(warnings({"--warn-router-entropy", "1"})
                .find(" Warning: step 2, layer 0: the router's entropy is "),
            std::string::npos);
}

TEST_F(TrainerRun, SeveralEvaluationSets) {
  EXPECT_EQ(
      train({"--train-iters", "2", "--eval-interval", "2", "--eval-iters", "4", "--valid-data-path",
             "b=" + (*folder / "books"), "--valid-data-path", *folder / "news", "--save", save}),
      ExitStatus::done);
  int found = 0;
  for (const json& line : lines(save)) {
    if (!line.contains("val_loss")) continue;
    ++found;
    EXPECT_EQ(line.at("val_loss"), line.at("val_loss/b"));
    EXPECT_EQ(line.at("val_tokens/news"), 4 * 16);
    EXPECT_NE(line.at("val_loss/b"), line.at("val_loss/news"));
  }
  EXPECT_EQ(found, 2) << "at steps 0 and 2";
  EXPECT_NE(refusal({"--train-iters", "2", "--eval-interval", "2", "--valid-data-path",
                     *folder / "news", "--valid-data-path", "news=" + (*folder / "books")})
                .find("two sets are called \"news\""),
            std::string::npos);
}

TEST_F(TrainerRun, TheFirstEqualsSignEndsTheNameOfAnEvaluationSet) {
  write_data("a=b", 5);
  EXPECT_EQ(train({"--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1",
                   "--valid-data-path", "c=" + (*folder / "a=b"), "--save", save}),
            ExitStatus::done);
  EXPECT_EQ(evaluated(save, "val_loss/c"), evaluated(save, "val_loss"));
}

// At this rate no weight moves: all losses are the same.
TEST_F(TrainerRun, OfEqualLossesTheFirstIsTheBest) {
  EXPECT_EQ(
      train({"--train-iters", "3", "--eval-interval", "1", "--eval-iters", "1", "--save", save},
            "1e-300"),
      ExitStatus::done);
  const std::vector<double> losses = evaluated(save, "val_loss");
  ASSERT_EQ(losses, std::vector<double>(4, losses.at(0)));
  EXPECT_EQ(training(save).at("best"), (json{{"step", 1}, {"loss", losses[0]}}));
}

TEST_F(TrainerRun, KeepsTheBestBesideTheNewest) {
  // The learning rate is so high that the loss soon rises.
  EXPECT_EQ(train({"--train-iters", "12", "--lr-decay-style", "constant", "--eval-interval", "1",
                   "--eval-iters", "4", "--save-best", "--save-interval", "2", "--keep-checkpoints",
                   "2", "--save", save},
                  "0.3"),
            ExitStatus::done);
  int64_t best = 0;
  double lowest = 1e9;
  for (const json& line : lines(save)) {
    if (!line.contains("val_loss") || line.at("step") == 0) continue;
    if (line.at("val_loss").get<double>() < lowest) {
      lowest = line.at("val_loss").get<double>();
      best = line.at("step").get<int64_t>();
    }
  }
  EXPECT_EQ(best_checkpoint_step(save), best);
  EXPECT_EQ(training(save).at("best"), (json{{"step", best}, {"loss", lowest}}));
  const std::vector<int64_t> kept = checkpoints(save);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), best), 1);
  EXPECT_EQ(kept.back(), 12);
  EXPECT_EQ(kept.size(), 3U) << "two newest and the best";
  EXPECT_EQ(Checkpoint::open(save + "/checkpoints/best").step(), best);
}

TEST_F(TrainerRun, RepeatsARunFromItsOptions) {
  EXPECT_EQ(train({"--train-iters", "3", "--seed", "11", "--save", save}), ExitStatus::done);
  const Arguments again = {"train", "--config", save + "/options.toml", "--save", save + "_again"};
  EXPECT_EQ(troupe::train(parse_command_line(again).options), ExitStatus::done);
  EXPECT_EQ(content(save + "_again"), content(save));
}

TEST_F(TrainerRun, ExitsAtAnIntervalAndGoesOnFromAStep) {
  const Arguments run = {"--train-iters", "9", "--save-interval", "1", "--save", save};
  EXPECT_EQ(train(run + Arguments{"--exit-interval", "4"}), ExitStatus::done);
  EXPECT_EQ(checkpoints(save), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_NE(refusal(run + Arguments{"--load", save, "--ckpt-step", "2"}).find("later checkpoints"),
            std::string::npos);
  EXPECT_NE(refusal(run + Arguments{"--load", save, "--ckpt-step", "7"}).find("The newest is 4"),
            std::string::npos);
  EXPECT_EQ(
      train({"--train-iters", "9", "--load", save, "--ckpt-step", "2", "--save", save + "_from_2"}),
      ExitStatus::done);
  EXPECT_EQ(train(run + Arguments{"--load", save}), ExitStatus::done);
  EXPECT_EQ(content(save + "_from_2"), content(save));
  EXPECT_NE(refusal({"--train-iters", "9", "--save", save + "_new", "--load", save + "_new",
                     "--exit-on-missing-checkpoint"})
                .find("there is no such folder"),
            std::string::npos);
}

TEST_F(TrainerRun, ARunThatIsTooShortIsRefused) {
  EXPECT_EQ(refusal({"--train-samples", "3", "--global-batch-size", "4"}),
            "--train-samples 3 are less than the first step's 4.");
}

TEST_F(TrainerRun, WritesTensorboardFiles) {
  EXPECT_EQ(train({"--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1",
                   "--tensorboard-dir", save}),
            ExitStatus::done);
  std::string text;
  for (const auto& entry : std::filesystem::directory_iterator(save)) {
    std::ifstream in(entry.path(), std::ios::binary);
    text.append(std::istreambuf_iterator<char>(in), {});
  }
  for (const char* tag : {"lm loss", "learning-rate", "grad-norm", "lm loss validation"}) {
    EXPECT_NE(text.find(tag), std::string::npos) << tag;
  }
}

// What ranks compute differs from one rank's by the order of sums. f64 rounds to 1e-16; the steps
// amplify it by less than a thousand.
void expect_close(const std::vector<double>& found, const std::vector<double>& expected,
                  const std::string& name) {
  ASSERT_EQ(found.size(), expected.size()) << name;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-10 * std::abs(expected[i])) << name << " " << i;
  }
}

std::vector<double> validation_losses(const std::vector<json>& lines) {
  std::vector<double> losses;
  for (const json& line : lines) {
    if (line.contains("val_loss")) losses.push_back(line.at("val_loss").get<double>());
  }
  return losses;
}

constexpr const char* kLogged[] = {"loss",   "grad_norm",      "lr",
                                   "tokens", "load_imbalance", "load_balancing_loss"};

TEST_F(TrainerRun, RanksTrainAsOneDoes) {
  // 4, then 8 samples a step.
  const Arguments run = {"--compute-dtype",     "fp64", "--train-samples",     "48",
                         "--global-batch-size", "8",    "--rampup-batch-size", "4 4 16",
                         "--eval-interval",     "2",    "--eval-iters",        "1"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  EXPECT_EQ(logged(save, "loss").size(), 8U);
  const double flops = Model(load_model_config(options_of(run))).training_flops(16);
  for (const char* ranks : {"1", "2", "4"}) {
    SCOPED_TRACE(std::string(ranks) + " ranks");
    const std::string with_ranks = save + "_" + ranks;
    EXPECT_EQ(train(run + Arguments{"--ranks", ranks, "--save", with_ranks}), ExitStatus::done);
    for (const json& line : lines(with_ranks)) {
      if (!line.contains("loss")) continue;
      const auto number = [&](const char* name) { return line.at(name).get<double>(); };
      // Three roundings of one product.
      EXPECT_NEAR(1e12 * number("tflops_per_gpu") * number("step_time_s") * std::stod(ranks),
                  flops * number("batch_size"), 1e-14 * flops * number("batch_size"));
      EXPECT_EQ(line.at("experts").at(0).at("dropped"), 0) << "of tokens times top-k";
    }
    for (const char* name : kLogged)
      expect_close(logged(with_ranks, name), logged(save, name), name);
    expect_close(validation_losses(lines(with_ranks)), validation_losses(lines(save)), "val_loss");
    EXPECT_EQ(lines(with_ranks).size(), lines(save).size()) << "one rank alone writes";
    EXPECT_EQ(checkpoints(with_ranks), checkpoints(save));
  }
}

// 22 batches of the one data set among 4 replicas: some have none in the last round.
TEST_F(TrainerRun, EvaluationsNeedNotDivideAmongReplicas) {
  const Arguments run = {"--compute-dtype",
                         "fp64",
                         "--train-iters",
                         "1",
                         "--global-batch-size",
                         "4",
                         "--eval-interval",
                         "1",
                         "--eval-iters",
                         "8",
                         "--valid-data-path",
                         "corpus=" + (*folder / "corpus"),
                         "--valid-data-path",
                         "books=" + (*folder / "books"),
                         "--split",
                         "1"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  EXPECT_EQ(train(run + Arguments{"--ranks", "4", "--save", save + "_4"}), ExitStatus::done);
  for (const char* name : {"val_loss", "val_loss/corpus", "val_loss/books"}) {
    expect_close(evaluated(save + "_4", name), evaluated(save, name), name);
  }
  EXPECT_EQ(evaluated(save + "_4", "val_tokens/books"), (std::vector<double>{352, 352}));
}

TEST_F(TrainerRun, GoesOnWithOtherRanks) {
  const Arguments run = {"--compute-dtype",     "fp64", "--train-iters", "6",
                         "--global-batch-size", "8"};
  EXPECT_EQ(train(run + Arguments{"--ranks", "2", "--save", save}), ExitStatus::done);
  for (const char* ranks : {"1", "2", "4"}) {
    SCOPED_TRACE(std::string(ranks) + " ranks");
    const std::string cut = save + "_" + ranks;
    const Arguments to = {"--save", cut, "--load", cut};
    EXPECT_EQ(train(run + to + Arguments{"--ranks", "2", "--exit-after-step", "3"}),
              ExitStatus::done);
    EXPECT_EQ(training(cut).at("position").at("consumed_samples"), 24);
    EXPECT_EQ(train(run + to + Arguments{"--ranks", ranks}), ExitStatus::done);
    for (const char* name : kLogged) expect_close(logged(cut, name), logged(save, name), name);
    if (std::string(ranks) == "2") {
      EXPECT_EQ(content(cut), content(save)) << "the same layout goes on to the same bits";
    }
  }
}

// Sharded optimizer state, in one instance or two: the same run, which goes on with and without it.
TEST_F(TrainerRun, ShardedOptimizersTrainAsOneDoes) {
  const Arguments run = {"--compute-dtype",     "fp64", "--train-iters", "6",
                         "--global-batch-size", "8",    "--ranks",       "4"};
  const Arguments one = {"--use-distributed-optimizer"};
  const Arguments two = one + Arguments{"--num-distributed-optimizer-instances", "2"};
  EXPECT_EQ(train(run + Arguments{"--save", save}), ExitStatus::done);
  const std::vector<std::pair<Arguments, Arguments>> parts = {{one, {}}, {{}, two}, {two, one}};
  for (size_t i = 0; i < parts.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string cut = save + "_" + std::to_string(i);
    const Arguments to = run + Arguments{"--save", cut, "--load", cut};
    EXPECT_EQ(train(to + parts[i].first + Arguments{"--exit-after-step", "3"}), ExitStatus::done);
    EXPECT_EQ(train(to + parts[i].second), ExitStatus::done);
    for (const char* name : kLogged) expect_close(logged(cut, name), logged(save, name), name);
  }
  EXPECT_NE(refusal(run + Arguments{"--num-distributed-optimizer-instances", "2"})
                .find("add --use-distributed-optimizer"),
            std::string::npos);
}

const Arguments kNarrow = {"--compute-dtype",
                           "bf16",
                           "--use-precision-aware-optimizer",
                           "--main-grads-dtype",
                           "bf16",
                           "--exp-avg-dtype",
                           "fp8",
                           "--exp-avg-sq-dtype",
                           "fp8"};

// With main gradients in bf16 and moments in 8 bits, on one rank and on several that share them.
TEST_F(TrainerRun, NarrowStateGoesOnToTheSameBits) {
  const Arguments run = kNarrow + Arguments{"--train-iters", "6", "--global-batch-size", "8"};
  for (const Arguments& ranks :
       {Arguments{}, Arguments{"--ranks", "2", "--use-distributed-optimizer"}}) {
    SCOPED_TRACE(ranks.size());
    const std::string whole = save + "_whole_" + std::to_string(ranks.size());
    const std::string cut = save + "_cut_" + std::to_string(ranks.size());
    EXPECT_EQ(train(run + ranks + Arguments{"--save", whole}), ExitStatus::done);
    const Arguments to = ranks + Arguments{"--save", cut, "--load", cut};
    EXPECT_EQ(train(run + to + Arguments{"--exit-after-step", "3"}), ExitStatus::done);
    EXPECT_EQ(train(run + to), ExitStatus::done);
    EXPECT_EQ(content(cut), content(whole));
    EXPECT_EQ(logged(cut, "loss"), logged(whole, "loss"));
  }
}

// A run of 60 steps in bf16: gradients in bf16 and moments in 8 bits lose, over its last ten steps,
// at most 2 % of what it has gained with fp32 ones. Their noise in the steps' sizes, 15 %, is about
// what a learning rate off by 1 % costs; a moment that stands still costs more than half.
TEST_F(TrainerRun, NarrowStateTrainsAsWideStateDoes) {
  const Arguments run = {"--train-iters", "60", "--global-batch-size", "8"};
  const auto last_of = [&](const std::string& name, const Arguments& more) {
    EXPECT_EQ(train(run + more + Arguments{"--save", save + name}, "3e-3"), ExitStatus::done);
    const std::vector<double> losses = logged(save + name, "loss");
    double sum = 0;
    for (size_t i = 50; i < 60; ++i) sum += losses.at(i);
    return std::pair(losses.at(0), sum / 10);
  };
  const auto [start, wide] = last_of("_wide", {"--compute-dtype", "bf16"});
  const auto [same_start, narrow] = last_of("_narrow", kNarrow);
  EXPECT_EQ(same_start, start);
  EXPECT_LT(wide, start - 1) << "it learns";
  EXPECT_NEAR(narrow, wide, 0.02 * (start - wide));
}

TEST_F(TrainerRun, NarrowStateNeedsItsOptionsAndLayout) {
  const Arguments run = {"--train-iters", "1"};
  EXPECT_EQ(refusal(run + Arguments{"--main-grads-dtype", "bf16"}),
            "--main-grads-dtype bf16: it belongs to --use-precision-aware-optimizer; add that, or "
            "use --grad-reduce-in-bf16.");
  const Arguments cut = {"--compute-dtype",
                         "bf16",
                         "--use-precision-aware-optimizer",
                         "--ranks",
                         "2",
                         "--tensor-model-parallel-size",
                         "2"};
  for (const std::string flag : {"--exp-avg-dtype", "--exp-avg-sq-dtype"}) {
    EXPECT_EQ(refusal(run + Arguments{flag, "fp8"}),
              flag + " fp8: it belongs to --use-precision-aware-optimizer; add that.");
    const std::string message = refusal(run + cut + Arguments{flag, "fp8"});
    EXPECT_EQ(message.find(flag + " fp8: --tensor-model-parallel-size 2 cuts the size"), 0U)
        << message;
    EXPECT_NE(message.find("into pieces of 8, which must be a multiple of 32"), std::string::npos)
        << message;
  }
}

TEST_F(TrainerRun, ABatchThatRanksCannotShareIsRefused) {
  EXPECT_EQ(
      refusal({"--train-iters", "1", "--global-batch-size", "6", "--micro-batch-size", "2",
               "--ranks", "2"}),
      "--global-batch-size 6: it must be a multiple of --micro-batch-size 2 x DP 2 = 4. Nearest: "
      "4 or 8.");
}

}  // namespace
}  // namespace troupe
