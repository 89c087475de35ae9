// Training checkpoints: everything that a run is comes back bit for bit, and a run is not continued
// as another one.
#include "train/training_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/thread_group.h"
#include "io/convert_dtype.h"
#include "io/model_config_json.h"
#include "support/adamw_state.h"
#include "train/run_saver.h"
#include "train/train_test_support.h"
#include "train/weights_in_parts.h"

namespace troupe {
namespace {

using namespace testing;

ModelConfig saved_model() {
  ModelConfig config = trained_model();
  config.hf_architecture = "Qwen3MoeForCausalLM";
  return config;
}

RunIdentity identity_of(const ModelConfig& config, DType dtype) {
  return {.model = config,
          .compute_dtype = dtype,
          .seed = 0xfedcba9876543210U,
          .sequence = 12,
          .split = "90,10,0",
          .tokenizer = {},
          .schedules = {.learning_rate = {.max_lr = 1e-3, .decay_samples = 96},
                        .weight_decay = {.end = 0.1, .samples = 96}},
          .ordered_samples = 96,
          .data = "0.5 x 10 sequences, 4000 tokens",
          .options_json = R"({"lr":0.001})"};
}

const TrainingPosition kPosition{
    .step = 12,
    .updates = 10,
    .consumed_samples = 48,
    .scheduled_samples = 40,
    .skipped_in_row = 2,
    .loss_scale = {.value = 0.75, .clean_steps = 7, .overflows_left = 1},
    .best_step = 8,
    .best_loss = 1.25};

template <class Body>
std::string refusal(ExitStatus status, const Body& body) {
  try {
    body();
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

class TrainingCheckpoint : public ::testing::TestWithParam<DType> {
 protected:
  TempFolder folder;
};

TEST_P(TrainingCheckpoint, ComesBackBitForBit) {
  const StepRunOptions options{.dtype = GetParam()};
  StepRun run(saved_model(), options);
  for (int64_t number = 1; number <= 3; ++number) run.update(number);
  const CheckpointInfo info = save_training_checkpoint(
      folder.path(), identity_of(run.config, GetParam()), kPosition, run.state, run.storage);
  EXPECT_EQ(info.step, 12);

  StepRun other(saved_model(), {.dtype = GetParam(), .seed = 2});
  const Checkpoint checkpoint = Checkpoint::open(info.path);
  load_training_state(checkpoint, other.config, other.state, other.storage);
  EXPECT_EQ(state_bytes(other.storage, /*with_gradients=*/false),
            state_bytes(run.storage, /*with_gradients=*/false));
  // Main gradients are rebuilt by each step, so the next step is the same.
  for (StepRun* each : {&run, &other}) {
    each->options.seed = 1;
    each->write_samples(100);
    each->update(4);
  }
  EXPECT_EQ(run.loss(), other.loss());
  expect_same_state(run.storage, other.storage);
}

TEST_P(TrainingCheckpoint, HoldsWhatTheFormatSays) {
  const StepRun run(saved_model(), {.dtype = GetParam()});
  const CheckpointInfo info = save_training_checkpoint(
      folder.path(), identity_of(run.config, GetParam()), kPosition, run.state, run.storage);
  const Checkpoint checkpoint = Checkpoint::open(info.path);
  size_t expected = 0;
  for (const Parameter& parameter : run.state.parameters) {
    expected += parameter.master.valid() ? 4 : 3;  // weights, two moments, master weights
  }
  EXPECT_EQ(checkpoint.tensors().size(), expected);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const bool weight =
        tensor.role == CheckpointRole::parameter && tensor.name.find("norm") == std::string::npos;
    EXPECT_EQ(tensor.dtype, weight ? GetParam() : accumulation_dtype(GetParam())) << tensor.name;
    EXPECT_EQ(tensor.name.find("grad."), std::string::npos) << tensor.name;
  }
}

// Weights alone, as for generation.
TEST_P(TrainingCheckpoint, LoadsIntoAModelThatIsNotTrained) {
  const StepRun run(saved_model(), {.dtype = GetParam()});
  const CheckpointInfo info = save_training_checkpoint(
      folder.path(), identity_of(run.config, GetParam()), kPosition, run.state, run.storage);
  const ModelState state = declare_model_state(saved_model(), GetParam(), /*trained=*/false);
  const StateStorage storage(state.table);
  load_training_state(Checkpoint::open(info.path), saved_model(), state, storage);
  for (const Parameter& parameter : state.parameters) {
    EXPECT_EQ(bytes_of(storage.view(parameter.value)),
              bytes_of(run.storage.view(run.state.parameters[parameter.number()].value)));
  }
}

std::vector<int64_t> saved_steps(const std::string& run) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(run)) steps.push_back(info.step);
  return steps;
}

// The clock makes up for a save that was asked for: that checkpoint stays, those by the clock alone
// replace one another.
TEST(RunSaver, ASaveThatIsRepeatedStaysWhatItWas) {
  const TempFolder folder;
  SaveSpec spec;
  spec.folder = folder / "run";
  const StepRun run(saved_model(), {});
  const RunIdentity identity = identity_of(run.config, DType::f64);
  RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
  const auto save = [&](SaveReason reason, int64_t step) {
    const TrainingPosition position{.step = step, .consumed_samples = step};
    saver.save(reason, identity, position, run.state, run.storage, [](const std::string&, bool) {});
  };
  std::filesystem::create_directory(spec.folder);
  put_file(folder / "run/checkpoints", "where the folder belongs");
  save(SaveReason::asked, 5);
  EXPECT_EQ(saver.last_saved_step(), -1);
  std::filesystem::remove(folder / "run/checkpoints");
  for (const int64_t step : {6, 7, 8}) save(SaveReason::clock, step);
  EXPECT_EQ(saved_steps(spec.folder), (std::vector<int64_t>{6, 8}));
}

// What is said of a save that fails and of the next ones, and what is kept.
TEST(RunSaver, SaysOnceThatSavesFail) {
  const TempFolder folder;
  SaveSpec spec;
  spec.folder = folder / "run";
  const StepRun run(saved_model(), {});
  const RunIdentity identity = identity_of(run.config, DType::f64);
  RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
  std::vector<std::pair<std::string, bool>> said;
  const auto save = [&](int64_t step) {
    const TrainingPosition position{.step = step, .consumed_samples = step};
    saver.save(SaveReason::asked, identity, position, run.state, run.storage,
               [&](const std::string& text, bool warns) { said.emplace_back(text, warns); });
  };
  EXPECT_EQ(saver.kept(), "Nothing was saved.");
  std::filesystem::create_directory(spec.folder);
  put_file(folder / "run/checkpoints", "where the folder belongs");
  save(5);
  save(6);
  EXPECT_EQ(saver.kept(), "Nothing was saved.");
  ASSERT_EQ(said.size(), 1U) << "once in a minute";
  EXPECT_EQ(said[0].first,
            "Warning: the checkpoint of step 5 was not saved: saving step 5 failed (earlier "
            "checkpoints are intact): " +
                spec.folder +
                "/checkpoints is a file, not a folder. Training goes on; the next attempt comes "
                "within 1 min 00 s.");
  EXPECT_TRUE(said[0].second);
  EXPECT_FALSE(saver.is_due()) << "a minute has not passed";
  std::filesystem::remove(folder / "run/checkpoints");
  said.clear();
  save(7);
  save(7);
  ASSERT_EQ(said.size(), 1U) << "a step is saved once";
  EXPECT_TRUE(said[0].first.starts_with("saved " + spec.folder + "/checkpoints/step_00000007 in "))
      << said[0].first;
  EXPECT_FALSE(said[0].second);
  EXPECT_EQ(saver.kept(), "The checkpoint of step 7 is kept.");
  EXPECT_FALSE(saver.is_due());
}

// Step 0 is a checkpoint, too: that of an upcycled model.
TEST(RunSaver, GoesOnInTheFolderOfItsRunAlone) {
  const TempFolder folder;
  SaveSpec spec;
  spec.folder = folder / "run";
  const StepRun run(saved_model(), {});
  const RunIdentity identity = identity_of(run.config, DType::f64);
  const auto refused = [&](int64_t step) {
    RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
    if (step >= 0) saver.go_on_from(step, /*by_clock=*/false);
    EXPECT_EQ(saver.last_saved_step(), step);
    try {
      saver.refuse_foreign_folder();
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(-1), "");
  const auto save = [&](int64_t step) {
    save_training_checkpoint(spec.folder, identity, {.step = step}, run.state, run.storage);
  };
  save(0);
  EXPECT_EQ(refused(0), "");
  EXPECT_EQ(refused(-1), "--save " + spec.folder + ": the folder holds another run. Give --load " +
                             spec.folder + " to go on with it, or save into another folder.");
  save(3);
  EXPECT_EQ(refused(3), "");
  EXPECT_EQ(refused(2), "--save " + spec.folder + ": the folder holds later checkpoints (" +
                            spec.folder +
                            "/checkpoints/step_00000003) than --ckpt-step 2. Save into another "
                            "folder, or remove them.");
}

TEST(RunSaver, WithoutAFolderNothingIsSaved) {
  SaveSpec spec;
  spec.minutes = 1e-9;
  const StepRun run(saved_model(), {});
  RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
  EXPECT_FALSE(saver.is_due());
  saver.lock();
  saver.refuse_foreign_folder();
  const auto say = [](const std::string& text, bool) { ADD_FAILURE() << text; };
  const RunIdentity identity = identity_of(run.config, DType::f64);
  saver.save(SaveReason::asked, identity, {.step = 1}, run.state, run.storage, say);
  saver.save_last(identity, {.step = 2}, run.state, run.storage, say);
  EXPECT_EQ(saver.last_saved_step(), -1);
}

// Of the newest one is kept beside those at the interval, also where the clock has made them.
TEST(RunSaver, WhatIsRetainedStaysWhoeverAskedForIt) {
  const TempFolder folder;
  SaveSpec spec;
  spec.folder = folder / "run";
  spec.retain_interval = 4;
  const StepRun run(saved_model(), {});
  const RunIdentity identity = identity_of(run.config, DType::f64);
  RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
  const auto save = [&](SaveReason reason, int64_t step) {
    const TrainingPosition position{.step = step, .consumed_samples = step};
    saver.save(reason, identity, position, run.state, run.storage, [](const std::string&, bool) {});
    return saved_steps(spec.folder);
  };
  using Steps = std::vector<int64_t>;
  EXPECT_EQ(save(SaveReason::asked, 1), Steps{1});
  EXPECT_EQ(save(SaveReason::asked, 2), Steps{2});
  EXPECT_EQ(save(SaveReason::clock, 4), (Steps{2, 4}));
  EXPECT_EQ(save(SaveReason::clock, 5), (Steps{4, 5}));
  EXPECT_EQ(save(SaveReason::asked, 6), (Steps{4, 6}));
}

TEST(RunSaver, KeepsAsManyAsAsked) {
  for (const int32_t newest : {0, 1, 2}) {
    const TempFolder folder;
    SaveSpec spec;
    spec.folder = folder / "run";
    spec.newest = newest;
    const StepRun run(saved_model(), {});
    RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
    for (const int64_t step : {1, 2, 3}) {
      saver.save(SaveReason::asked, identity_of(run.config, DType::f64), {.step = step}, run.state,
                 run.storage, [](const std::string&, bool) {});
    }
    EXPECT_EQ(saved_steps(spec.folder).size(), newest == 0 ? 3U : static_cast<size_t>(newest));
    EXPECT_EQ(saved_steps(spec.folder).back(), 3);
  }
}

// A run that goes on from what the clock has saved replaces it.
TEST(RunSaver, KnowsWhyACheckpointWasMade) {
  for (const bool by_clock : {false, true}) {
    const TempFolder folder;
    SaveSpec spec;
    spec.folder = folder / "run";
    const StepRun run(saved_model(), {});
    const RunIdentity identity = identity_of(run.config, DType::f64);
    const CheckpointInfo info =
        save_training_checkpoint(spec.folder, identity, {.step = 3}, run.state, run.storage,
                                 /*group=*/nullptr, {}, {.by_clock = by_clock});
    const StoredRun stored = read_stored_run(Checkpoint::open(info.path));
    EXPECT_EQ(stored.parts.by_clock, by_clock);
    RunSaver saver(spec, /*rank=*/0, /*group=*/nullptr);
    saver.go_on_from(3, stored.parts.by_clock);
    saver.save(SaveReason::asked, identity, {.step = 4}, run.state, run.storage,
               [](const std::string&, bool) {});
    EXPECT_EQ(saved_steps(spec.folder),
              by_clock ? std::vector<int64_t>{4} : std::vector<int64_t>({3, 4}));
  }
}

// What the ranks of a save say, of which the disks of some are broken.
std::vector<std::string> said_of_save(const std::vector<bool>& broken) {
  const TempFolder folder;
  const auto ranks = static_cast<int32_t>(broken.size());
  const ModelConfig config = saved_model();
  std::vector<std::string> said(broken.size());
  ThreadGroup group(ranks, std::chrono::seconds(60));
  run_ranks(group, [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    const ModelState state = declare_model_state(
        config, DType::f64, /*trained=*/true, data_parallel_part(config.num_layers, ranks, rank));
    const StateStorage storage(state.table);
    CheckpointOptions options;
    options.hook = [&](std::string_view operation, const std::string&) {
      if (broken[own] && operation == "write") throw_failed(fmt::format("disk {} broke", rank));
    };
    said[own] = refusal(ExitStatus::failed, [&] {
      save_training_checkpoint(folder.path(), identity_of(config, DType::f64), kPosition, state,
                               storage, &group, options);
    });
  });
  EXPECT_TRUE(list_checkpoints(folder.path()).empty());
  return said;
}

TEST(TrainingCheckpointOfRanks, NamesTheFirstThatFailed) {
  const std::vector<std::string> others = said_of_save({false, true, true});
  expect_part(others[0], "rank 1: ");
  expect_part(others[0], "disk 1 broke");
  const std::vector<std::string> all = said_of_save({true, false, true});
  expect_part(all[0], "disk 0 broke");
  EXPECT_FALSE(all[0].starts_with("rank ")) << all[0];
}

TEST(NarrowTrainingCheckpoint, ComesBackBitForBit) {
  const TempFolder folder;
  const StepRunOptions options{.dtype = DType::bf16,
                               .narrow = {DType::bf16, DType::f8e4m3, DType::f8e4m3}};
  StepRun run(saved_model(), options);
  for (int64_t number = 1; number <= 3; ++number) run.update(number);
  const CheckpointInfo info = save_training_checkpoint(
      folder.path(), identity_of(run.config, DType::bf16), kPosition, run.state, run.storage);
  StepRun other(saved_model(), options);
  load_training_state(Checkpoint::open(info.path), other.config, other.state, other.storage);
  for (StepRun* each : {&run, &other}) {
    each->write_samples(100);
    each->update(4);
  }
  EXPECT_EQ(run.loss(), other.loss());
  expect_same_state(run.storage, other.storage);

  // Weights alone; and moments of another dtype are not converted.
  const ModelState untrained = declare_model_state(saved_model(), DType::bf16, /*trained=*/false);
  const StateStorage weights(untrained.table);
  load_training_state(Checkpoint::open(info.path), saved_model(), untrained, weights);
  StepRun wide(saved_model(), {.dtype = DType::bf16});
  const std::string message = refusal(ExitStatus::bad_request, [&] {
    load_training_state(Checkpoint::open(info.path), wide.config, wide.state, wide.storage);
  });
  expect_part(message, "exp_avg");
  expect_part(message, "f8e4m3");
}

// Of moments with scales and of moments without.
TEST(ResetOptimizer, ForgetsEveryMoment) {
  for (const NarrowState& narrow : {NarrowState{}, {DType::bf16, DType::f8e4m3, DType::f8e4m3}}) {
    StepRun run(saved_model(), {.dtype = DType::bf16, .narrow = narrow});
    run.update(1);
    reset_optimizer(run.state, run.storage, /*masters_too=*/false);
    for (const Parameter& parameter : run.state.parameters) {
      for (const StateId id : {exp_avg_of(parameter).values, exp_avg_of(parameter).scales,
                               exp_avg_sq_of(parameter).values, exp_avg_sq_of(parameter).scales}) {
        if (!id.valid()) continue;
        const TensorView view = run.storage.view(id);
        const auto* const bytes = static_cast<const char*>(view.data);
        const int64_t size = view.shape.elements() * static_cast<int64_t>(size_of(view.dtype));
        EXPECT_EQ(std::count(bytes, bytes + size, 0), size) << (*run.state.table)[id].name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, TrainingCheckpoint,
                         ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class StoredRunTest : public ::testing::Test {
 protected:
  StoredRun round_trip(const RunIdentity& identity) {
    const StepRun run(identity.model, {.dtype = identity.compute_dtype});
    path =
        save_training_checkpoint(folder.path(), identity, kPosition, run.state, run.storage).path;
    return read_stored_run(Checkpoint::open(path));
  }
  // Refuses `wanted` as the continuation of `stored`.
  std::string refused(const StoredRun& stored, const RunIdentity& wanted) {
    return refusal(ExitStatus::bad_request, [&] { require_same_run(stored, wanted, path); });
  }

  TempFolder folder;
  std::string path;
};

// Also what later versions have added to a model.
TEST_F(StoredRunTest, TheModelComesBack) {
  RunIdentity identity = identity_of(saved_model(), DType::f32);
  identity.model.moe_router_force_biased = 0.5;
  identity.model.embedding_init_method_std = 0.25;
  identity.model.init_method_xavier_uniform = true;
  identity.model.mtp_num_layers = 2;
  identity.model.mtp_loss_scaling_factor = 0.5;
  identity.model.mtp_use_repeated_layer = true;
  EXPECT_EQ(round_trip(identity).identity.model, identity.model);
  identity.model.qk_layernorm = false;
  identity.model.qk_l2_norm = true;
  EXPECT_EQ(round_trip(identity).identity.model, identity.model);
}

TEST_F(StoredRunTest, FactsComeBack) {
  const RunIdentity identity = identity_of(saved_model(), DType::bf16);
  const StoredRun stored = round_trip(identity);
  EXPECT_EQ(stored.position.step, kPosition.step);
  EXPECT_EQ(stored.position.updates, kPosition.updates);
  EXPECT_EQ(stored.position.consumed_samples, kPosition.consumed_samples);
  EXPECT_EQ(stored.position.scheduled_samples, kPosition.scheduled_samples);
  EXPECT_EQ(stored.position.skipped_in_row, kPosition.skipped_in_row);
  EXPECT_EQ(stored.position.best_step, kPosition.best_step);
  EXPECT_EQ(stored.position.best_loss, kPosition.best_loss);
  EXPECT_EQ(stored.position.loss_scale, LossScale{}) << "only fp16 has one";
  EXPECT_EQ(round_trip(identity_of(saved_model(), DType::f16)).position.loss_scale,
            kPosition.loss_scale);
  EXPECT_EQ(schedule_difference(stored.identity.schedules, identity.schedules), "");
  EXPECT_EQ(stored.identity.compute_dtype, DType::bf16);
  EXPECT_EQ(stored.identity.seed, identity.seed);
  EXPECT_EQ(stored.identity.sequence, identity.sequence);
  EXPECT_EQ(stored.identity.split, identity.split);
  EXPECT_TRUE(stored.identity.tokenizer.same_as(identity.tokenizer));
  EXPECT_EQ(nlohmann::json::parse(stored.identity.options_json),
            nlohmann::json::parse(identity.options_json));
  EXPECT_EQ(stored.identity.model.num_experts, identity.model.num_experts);
  EXPECT_EQ(stored.identity.model.moe_aux_loss_coeff, identity.model.moe_aux_loss_coeff);
}

TEST_F(StoredRunTest, TheSameRunGoesOn) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  const StoredRun stored = round_trip(identity);
  EXPECT_NO_THROW(require_same_run(stored, identity, path));
  RunIdentity other_options = identity;
  other_options.options_json = "{}";  // for the reader of the file
  EXPECT_NO_THROW(require_same_run(stored, other_options, path));
}

TEST_F(StoredRunTest, OtherDataOfTheSameCountsAreRefused) {
  RunIdentity identity = identity_of(saved_model(), DType::f32);
  identity.data_hashes = {{.bytes = 8000, .sampled = 1, .full = 0xfffffffffffffff2U}};
  const StoredRun stored = round_trip(identity);
  const auto refused_data = [&](const RunIdentity& wanted) {
    return refusal(ExitStatus::bad_request,
                   [&] { require_same_data(stored, wanted, {"corpus"}, path); });
  };
  EXPECT_NO_THROW(require_same_data(stored, identity, {"corpus"}, path));
  RunIdentity other = identity;
  const auto refused_second = [&] {
    StoredRun two = stored;
    two.identity.data_hashes.push_back({.bytes = 9, .sampled = 1, .full = {}});
    RunIdentity wanted = two.identity;
    wanted.data_hashes[1].bytes = 10;
    return refusal(ExitStatus::bad_request, [&] {
      require_same_data(two, wanted, {"corpus", "books"}, path);
    });
  };
  expect_part(refused_second(), "--data-path books: ");
  other.data_hashes[0].full = 3;
  const std::string message = refused_data(other);
  expect_part(message, "--data-path corpus");
  expect_part(message, "8000 bytes, xxh3 fffffffffffffff2 then, 8000 bytes, xxh3 0000000000000003");
  expect_part(message, "--allow-changed-data");
  other = identity;
  other.data_hashes[0] = {.bytes = 8000, .sampled = 2, .full = {}};
  refused_data(other);
  // Not known yet, or not in the checkpoint.
  other.data_hashes[0].sampled = 1;
  EXPECT_NO_THROW(require_same_data(stored, other, {"corpus"}, path));
  EXPECT_NO_THROW(require_same_data(round_trip(identity_of(saved_model(), DType::f32)), identity,
                                    {"corpus"}, path));
}

TEST_F(StoredRunTest, ACheckpointWithoutItsSeedNeedsAWord) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  StoredRun stored = round_trip(identity);
  RunIdentity other = identity;
  other.seed = 5;
  EXPECT_NO_THROW(require_same_run(stored, other, path, /*any_seed=*/true));
  stored.parts.seed = false;
  expect_part(refused(stored, identity), "--no-load-rng");
  EXPECT_NO_THROW(require_same_run(stored, identity, path, /*any_seed=*/true));
}

TEST_F(StoredRunTest, AnotherRunIsRefused) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  const StoredRun stored = round_trip(identity);

  RunIdentity other = identity;
  other.model.rotary_base = 5e5;
  std::string message = refused(stored, other);
  expect_part(message, path);
  expect_part(message,
              "another model than the flags describe:\n  rotary_base: 10000.0 saved, "
              "500000.0 now\n");
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 2)
      << "only what differs: " << message;

  // Of lists the first value that differs, or how long they are.
  RunIdentity layers = identity;
  layers.model.num_layers = 40;
  layers.model.moe_layers.assign(40, true);
  const StoredRun deep = round_trip(layers);
  other = layers;
  other.model.moe_layers[30] = false;
  expect_part(refused(deep, other), "\n  moe_layers[30]: true saved, false now\n");
  other.model.num_layers = 41;
  other.model.moe_layers.assign(41, true);
  expect_part(refused(deep, other), "\n  moe_layers: 40 values saved, 41 now\n");

  other = identity;
  other.model = mixtral_like_model(4);
  message = refused(stored, other);
  EXPECT_LT(std::count(message.begin(), message.end(), '\n'), 16) << message;

  other = identity;
  other.compute_dtype = DType::bf16;
  message = refused(stored, other);
  expect_part(message, path);
  expect_part(message, "was saved with --compute-dtype fp32, this run has bf16");
  expect_part(message, "--finetune");

  other = identity;
  other.seed = 1;
  expect_part(refused(stored, other), "was saved with --seed 18364758544493064720, this run has 1");

  other = identity;
  other.sequence = 24;
  expect_part(refused(stored, other), "was saved with --seq-length 12, this run has 24");

  other = identity;
  other.split = "1,0,0";
  expect_part(refused(stored, other), "was saved with --split 90,10,0, this run has 1,0,0");
}

// All that differs, up to a number of lines and of characters.
TEST_F(StoredRunTest, WhatDiffersInModelsIsListed) {
  const auto listed = [&](size_t count, const std::string& name) {
    StoredRun stored;
    RunIdentity wanted;
    stored.identity.model.hf_architecture = name;
    std::vector<double ModelConfig::*> fields = {&ModelConfig::activation_clamp,
                                                 &ModelConfig::attention_dropout,
                                                 &ModelConfig::glu_linear_offset,
                                                 &ModelConfig::hidden_dropout,
                                                 &ModelConfig::init_method_std,
                                                 &ModelConfig::moe_aux_loss_coeff,
                                                 &ModelConfig::moe_input_jitter_eps,
                                                 &ModelConfig::moe_router_force_biased,
                                                 &ModelConfig::moe_seq_aux_loss_coeff,
                                                 &ModelConfig::moe_z_loss_coeff,
                                                 &ModelConfig::mtp_loss_scaling_factor,
                                                 &ModelConfig::norm_epsilon,
                                                 &ModelConfig::rotary_base};
    fields.resize(count);
    for (double ModelConfig::*const field : fields) {
      stored.identity.model.*field = 0.25;
      wanted.model.*field = 0.75;
    }
    return refused(stored, wanted);
  };
  const auto text = [&](const std::string& lines) {
    return path + " holds another model than the flags describe:" + lines +
           "\nGive the same flags, or --use-checkpoint-args to take the model from the checkpoint.";
  };
  const std::string first =
      "\n  activation_clamp: 0.25 saved, 0.75 now"
      "\n  attention_dropout: 0.25 saved, 0.75 now";
  EXPECT_EQ(listed(2, ""), text(first));
  const std::string longest(58, 'x');  // 60 with its quotes
  EXPECT_EQ(listed(2, longest),
            text(first + "\n  hf_architecture: \"" + longest + "\" saved, \"\" now"));
  EXPECT_EQ(listed(2, longest + "y"),
            text(first + "\n  hf_architecture: \"" + longest + "y... saved, \"\" now"));
  const std::string twelve = listed(12, "");
  EXPECT_EQ(std::count(twelve.begin(), twelve.end(), '\n'), 13);
  expect_part(twelve, "\n  norm_epsilon: 0.25 saved, 0.75 now\nGive");
  expect_part(listed(13, ""), "\n  norm_epsilon: 0.25 saved, 0.75 now\n  and 1 more\nGive");
  expect_part(listed(13, "x"),
              "\n  mtp_loss_scaling_factor: 0.25 saved, 0.75 now\n  and 2 more\nGive");
}

// Every field of the model; a new one does not compile until it stands here.
template <class Visit>
void visit_model_fields(ModelConfig& config, const Visit& visit) {
  auto& [vocab_size, padding_token, hidden_size, num_layers, mtp_num_layers,
         mtp_loss_scaling_factor, mtp_use_repeated_layer, num_attention_heads, num_query_groups,
         kv_channels, qk_layernorm, qk_norm_scope, qk_l2_norm, add_qkv_bias, sliding_window,
         window_layers, attention_sinks, zero_attention_sinks, attention_output_gate,
         max_position_embeddings, linear_attention_layers, linear_conv_kernel_dim,
         linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim,
         rotary_base, rotary_percent, rotary_interleaved, rope_scaling_type, rope_scaling_factor,
         rope_original_positions, rope_scaling_fast, rope_scaling_slow, rope_round_range,
         rope_mscale, rope_mscale_all_dim, rope_attention_factor, multi_latent_attention,
         q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim,
         latent_norm_epsilon, dsa_indexer_topk, dsa_indexer_n_heads, dsa_indexer_head_dim,
         dsa_indexer_k_norm_epsilon, dsa_indexer_loss_coeff, dsa_indexer_use_sparse_loss,
         normalization, zero_centered_gamma, norm_epsilon, ffn_hidden_size, activation,
         gated_linear_unit, activation_clamp, glu_linear_offset, add_bias_linear, tie_embeddings,
         hidden_dropout, attention_dropout, num_experts, moe_router_topk, moe_ffn_hidden_size,
         moe_layers, moe_shared_expert_intermediate_size, moe_shared_expert_gate,
         moe_router_score_function, moe_router_pre_softmax, moe_router_topk_scaling_factor,
         moe_router_num_groups, moe_router_group_topk, moe_router_group_scores,
         moe_router_normalize_scores, moe_router_sinkhorn, moe_router_enable_expert_bias,
         moe_router_bias_update_rate, moe_router_fp64, moe_input_jitter_eps,
         moe_router_force_load_balancing, moe_router_force_biased, moe_aux_loss_coeff,
         moe_seq_aux_loss_coeff, moe_global_aux_loss_coeff, moe_z_loss_coeff,
         moe_expert_capacity_factor, moe_token_drop_policy, moe_pad_expert_input_to_capacity,
         moe_expert_row_multiple, init_method_std, embedding_init_method_std,
         init_method_xavier_uniform, hf_architecture] = config;
  const auto each = [&](auto&... field) { (visit(field), ...); };
  each(vocab_size, padding_token, hidden_size, num_layers, mtp_num_layers, mtp_loss_scaling_factor,
       mtp_use_repeated_layer, num_attention_heads, num_query_groups, kv_channels, qk_layernorm,
       qk_norm_scope, qk_l2_norm, add_qkv_bias, sliding_window, window_layers, attention_sinks,
       zero_attention_sinks, attention_output_gate, max_position_embeddings,
       linear_attention_layers, linear_conv_kernel_dim, linear_num_key_heads,
       linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, rotary_base,
       rotary_percent, rotary_interleaved, rope_scaling_type, rope_scaling_factor,
       rope_original_positions, rope_scaling_fast, rope_scaling_slow, rope_round_range, rope_mscale,
       rope_mscale_all_dim, rope_attention_factor, multi_latent_attention, q_lora_rank,
       kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim, latent_norm_epsilon,
       dsa_indexer_topk, dsa_indexer_n_heads, dsa_indexer_head_dim, dsa_indexer_k_norm_epsilon,
       dsa_indexer_loss_coeff, dsa_indexer_use_sparse_loss, normalization, zero_centered_gamma,
       norm_epsilon, ffn_hidden_size, activation, gated_linear_unit, activation_clamp,
       glu_linear_offset, add_bias_linear, tie_embeddings, hidden_dropout, attention_dropout,
       num_experts, moe_router_topk, moe_ffn_hidden_size, moe_layers,
       moe_shared_expert_intermediate_size, moe_shared_expert_gate, moe_router_score_function,
       moe_router_pre_softmax, moe_router_topk_scaling_factor, moe_router_num_groups,
       moe_router_group_topk, moe_router_group_scores, moe_router_normalize_scores,
       moe_router_sinkhorn, moe_router_enable_expert_bias, moe_router_bias_update_rate,
       moe_router_fp64, moe_input_jitter_eps, moe_router_force_load_balancing,
       moe_router_force_biased, moe_aux_loss_coeff, moe_seq_aux_loss_coeff,
       moe_global_aux_loss_coeff, moe_z_loss_coeff, moe_expert_capacity_factor,
       moe_token_drop_policy, moe_pad_expert_input_to_capacity, moe_expert_row_multiple,
       init_method_std, embedding_init_method_std, init_method_xavier_uniform, hf_architecture);
}

template <class T>
T another(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return !value;
  } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, std::vector<bool>>) {
    return T(1, 1);
  } else {
    return static_cast<T>(static_cast<int>(value) + 1);  // of names, too, there is a second one
  }
}

// What is not written is not compared with the model of the run that goes on.
TEST_F(StoredRunTest, EveryFieldOfTheModelIsWritten) {
  ModelConfig config;
  const std::string unchanged = write_model_config(config);
  int number = 0;
  visit_model_fields(config, [&](auto& field) {
    const auto before = std::exchange(field, another(field));
    EXPECT_FALSE(write_model_config(config) == unchanged)
        << "field " << number << " of ModelConfig";
    field = before;
    ++number;
  });
}

// The z-loss is minimised with the rest, so another coefficient is another run.
TEST_F(StoredRunTest, AnotherZLossIsRefused) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  const StoredRun stored = round_trip(identity);
  EXPECT_EQ(stored.identity.model.moe_z_loss_coeff, identity.model.moe_z_loss_coeff);
  RunIdentity other = identity;
  other.model.moe_z_loss_coeff = 0.5;
  refused(stored, other);
}

TEST_F(StoredRunTest, AnotherTokenizerIsRefused) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  const StoredRun stored = round_trip(identity);
  RunIdentity other = identity;
  other.tokenizer.type = "SentencePieceTokenizer";
  expect_part(refused(stored, other), "--tokenizer-type byte, this run has SentencePieceTokenizer");
}

// The file goes with the weights: what comes back makes the same tokenizer without it. Beside it
// lies other state, the experts' biases.
TEST_F(StoredRunTest, TheTokenizersFileIsKept) {
  RunIdentity identity = identity_of(saved_model(), DType::f32);
  identity.model.moe_router_score_function = ScoreFunction::sigmoid;
  identity.model.moe_router_enable_expert_bias = true;
  identity.tokenizer = {.type = "HuggingFaceTokenizer",
                        .path = "somewhere/tokenizer.json",
                        .contents = std::string("any\0 bytes", 10),
                        .eod = "<|endoftext|>"};
  const StoredRun stored = round_trip(identity);
  EXPECT_TRUE(stored.identity.tokenizer.same_as(identity.tokenizer));
  EXPECT_NO_THROW(require_same_run(stored, identity, path));
  RunIdentity other = identity;
  other.tokenizer.contents += "!";
  const std::string message = refused(stored, other);
  expect_part(message, "--tokenizer-model");
  expect_part(message, "somewhere/tokenizer.json");
  other = identity;
  other.tokenizer.eod = "<|im_end|>";
  expect_part(refused(stored, other), "eos_token");

  // The weights load as ever.
  const StepRun run(identity.model, {.dtype = identity.compute_dtype});
  EXPECT_NO_THROW(load_training_state(Checkpoint::open(path), run.config, run.state, run.storage));
}

// What came with the model goes with the weights, too.
TEST_F(StoredRunTest, TheSourceIsKept) {
  RunIdentity identity = identity_of(saved_model(), DType::f32);
  identity.source = {.config_json = "{\"hidden_size\":  1}",
                     .has_weights = true,
                     .keeps_token_ids = true,
                     .files = {{"chat_template.jinja", "{{ messages }}"},
                               {"generation_config.json", std::string("\0\xff", 2)}}};
  const ModelSource stored = round_trip(identity).identity.source;
  EXPECT_EQ(stored.config_json, identity.source.config_json);
  EXPECT_TRUE(stored.has_weights);
  EXPECT_TRUE(stored.keeps_token_ids);
  ASSERT_EQ(stored.files.size(), 2U);
  for (const HfFile& file : identity.source.files) {
    const HfFile* found = find_file(stored.files, file.name);
    ASSERT_NE(found, nullptr) << file.name;
    EXPECT_EQ(found->contents, file.contents);
  }
  const StepRun run(identity.model, {.dtype = identity.compute_dtype});
  EXPECT_NO_THROW(load_training_state(Checkpoint::open(path), run.config, run.state, run.storage));

  // Only names that a folder may have: an export writes under them.
  identity.source.files = {{"../outside", "x"}};
  expect_part(refusal(ExitStatus::failed, [&] { round_trip(identity); }), "\"../outside\"");
}

// Weights go from any compute dtype into any other: values are rounded once, and what is wider
// comes from the master weights.
TEST(CheckpointWeights, ComeIntoAnotherDtype) {
  const ModelConfig config = saved_model();
  for (const DType from : {DType::f64, DType::f32, DType::bf16}) {
    const TempFolder folder;
    StepRun run(config, {.dtype = from});
    run.update(1);
    const std::string path = save_training_checkpoint(folder.path(), identity_of(config, from),
                                                      kPosition, run.state, run.storage)
                                 .path;
    for (const DType to : {DType::f64, DType::f32, DType::bf16}) {
      const StepRun other(config, {.dtype = to, .seed = 2});
      CheckpointWeights(Checkpoint::open(path), from, config).load(other.state, other.storage);
      for (const Parameter& parameter : other.state.parameters) {
        const Parameter& saved = run.state.parameters[parameter.number()];
        const TensorView widest =
            run.storage.view(saved.master.valid() ? saved.master : saved.value);
        const auto expect_from = [&](const TensorView& view, const TensorView& source) {
          std::vector<std::byte> wanted(static_cast<size_t>(view.shape.elements()) *
                                        size_of(view.dtype));
          convert_elements(to_file_dtype(source.dtype), source.data, view.dtype, wanted.data(),
                           view.shape.elements());
          EXPECT_EQ(std::memcmp(view.data, wanted.data(), wanted.size()), 0)
              << name_of(from) << " to " << name_of(to) << ": "
              << (*other.state.table)[parameter.value].name;
        };
        expect_from(other.storage.view(parameter.value), widest);
        if (parameter.master.valid()) expect_from(other.storage.view(parameter.master), widest);
      }
    }
  }
}

TEST(CheckpointWeights, AreTheSameInParts) {
  const ModelConfig config = saved_model();
  for (const DType from : {DType::f32, DType::bf16}) {
    const TempFolder folder;
    StepRun run(config, {.dtype = from});
    run.update(1);
    const std::string path = save_training_checkpoint(folder.path(), identity_of(config, from),
                                                      kPosition, run.state, run.storage)
                                 .path;
    SavedModel model;
    model.config = config;
    model.compute_dtype = from;
    model.path = path;
    model.from_checkpoint = true;
    for (const DType to : {DType::f32, DType::bf16}) expect_same_in_parts(model, to);
  }
}

// In bytes of the checkpoint, which has no master weights: all is taken as it is, or all but norms
// is converted, or all of it is.
TEST(CheckpointWeights, SayHowManyBytesAreLoaded) {
  const ModelConfig config = saved_model();
  const TempFolder folder;
  const StepRun run(config, {.dtype = DType::bf16});
  const std::string path =
      save_training_checkpoint(folder.path(), identity_of(config, DType::bf16), kPosition,
                               run.state, run.storage, /*group=*/nullptr, {}, {.optimizer = false})
          .path;
  for (const DType to : {DType::bf16, DType::f32, DType::f64}) {
    const ModelState state = declare_model_state(config, to, /*trained=*/false);
    const StateStorage storage(state.table);
    std::vector<std::pair<uint64_t, uint64_t>> said;
    CheckpointWeights(Checkpoint::open(path), DType::bf16, config)
        .load(state, storage,
              [&](uint64_t done, uint64_t total) { said.emplace_back(done, total); });
    uint64_t bytes = 0;
    for (const Parameter& parameter : state.parameters) {
      const bool is_norm = parameter.name.find("norm") != std::string::npos;
      bytes += static_cast<uint64_t>(parameter.whole_shape.elements()) * (is_norm ? 4 : 2);
    }
    ASSERT_FALSE(said.empty()) << name_of(to);
    EXPECT_TRUE(std::is_sorted(said.begin(), said.end())) << name_of(to);
    for (const auto& [done, total] : said) EXPECT_EQ(total, bytes) << name_of(to);
    EXPECT_EQ(said.back().first, bytes) << name_of(to);
  }
}

// Weights that one state has as master weights alone (RunLayout::weight_codes), and the other
// beside these.
TEST(CheckpointWeights, MayBeMastersAloneOnOneSide) {
  const ModelConfig config = saved_model();
  ThreadPool pool(1);
  const auto declared = [&](bool in_codes) {
    RunLayout layout = layout_of_one_rank(config.num_layers);
    if (in_codes) layout.weight_codes = WeightCodes{};
    return declare_model_state(config, DType::bf16, /*trained=*/true,
                               {.run = std::make_shared<const RunLayout>(std::move(layout))});
  };
  for (const bool in_codes : {false, true}) {
    const TempFolder folder;
    const ModelState saved = declared(in_codes);
    const StateStorage storage(saved.table);
    initialize_parameters(saved, storage, 1, pool);
    const std::string path =
        save_training_checkpoint(folder.path(), identity_of(config, DType::bf16), kPosition, saved,
                                 storage)
            .path;
    for (const bool with_optimizer : {true, false}) {
      const ModelState state = declared(!in_codes);
      const StateStorage loaded(state.table);
      load_training_state(Checkpoint::open(path), config, state, loaded, {}, with_optimizer);
      int alone = 0;
      for (const Parameter& parameter : state.parameters) {
        const Parameter& from = saved.parameters[parameter.number()];
        if ((*state.table)[parameter.value].is_stored == (*saved.table)[from.value].is_stored) {
          EXPECT_EQ(bytes_of(loaded.view(parameter.value)), bytes_of(storage.view(from.value)));
          continue;
        }
        ++alone;
        const TensorView master = storage.view(from.master);
        if (in_codes) {
          std::vector<double> rounded = elements(master);
          for (double& each : rounded) each = static_cast<double>(bf16(each));
          EXPECT_EQ(elements(loaded.view(parameter.value)), rounded);
        } else if (with_optimizer) {
          EXPECT_EQ(bytes_of(loaded.view(parameter.master)), bytes_of(master));
        }
      }
      EXPECT_GT(alone, 0);
    }
  }
}

TEST(CheckpointWeights, ThatAreNotFiniteAreNamed) {
  const ModelConfig config = saved_model();
  const TempFolder folder;
  StepRun run(config, {.dtype = DType::f32});
  const Parameter& broken = run.state.parameters[3];
  run.storage.view(broken.value).as<float>()[2] = std::numeric_limits<float>::quiet_NaN();
  const std::string path = save_training_checkpoint(folder.path(), identity_of(config, DType::f32),
                                                    kPosition, run.state, run.storage)
                               .path;
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  const StateStorage storage(state.table);
  const std::string message = refusal(ExitStatus::failed, [&] {
    CheckpointWeights(Checkpoint::open(path), DType::f32, config).load(state, storage);
  });
  expect_part(message, (*run.state.table)[broken.value].name + " is not finite as f32 (element 2");
}

// A damaged checkpoint that is newer than the one that is taken, unless it is whole again by then.
TEST_F(StoredRunTest, ANewerCheckpointThatIsDamagedIsTold) {
  const RunIdentity identity = identity_of(saved_model(), DType::f32);
  const StepRun run(identity.model, {.dtype = DType::f32});
  const auto save = [&](int64_t step) {
    return save_training_checkpoint(folder.path(), identity, {.step = step}, run.state, run.storage)
        .path;
  };
  const std::string one = save(1);
  const std::string two = save(2);
  std::vector<std::string> incomplete;
  EXPECT_EQ(find_checkpoint(folder.path(), std::nullopt, &incomplete), two);
  EXPECT_EQ(passed_over(folder.path(), two, {"of another time"}), "");
  std::filesystem::rename(two + "/COMMIT", two + "/kept");
  EXPECT_EQ(find_checkpoint(folder.path(), std::nullopt, &incomplete), one);
  ASSERT_EQ(incomplete.size(), 1U);
  EXPECT_EQ(passed_over(folder.path(), one, incomplete),
            folder.path() +
                ": the newest checkpoint, of step 2, is damaged; the newest complete one is that "
                "of step 1. (" +
                incomplete[0] + ")");
  EXPECT_EQ(passed_over(folder.path(), one, {}), "");
  EXPECT_EQ(passed_over(one, one, incomplete), "") << "it was named";
  std::filesystem::rename(two + "/kept", two + "/COMMIT");
  EXPECT_EQ(passed_over(folder.path(), one, incomplete), "");
}

class BrokenFacts : public StoredRunTest {
 protected:
  // A checkpoint whose facts are changed, and the message with which it is refused.
  template <class Change>
  std::string broken(const Change& change) {
    round_trip(identity_of(saved_model(), DType::f32));
    const Checkpoint good = Checkpoint::open(path);
    nlohmann::json facts = nlohmann::json::parse(good.training());
    change(facts);
    CheckpointContent content;
    content.step = 13;
    content.training = facts.dump();
    const std::string changed = save_checkpoint(folder.path(), content).path;
    return refusal(ExitStatus::failed, [&] { read_stored_run(Checkpoint::open(changed)); });
  }
};

TEST_F(BrokenFacts, AreRefusedByName) {
  expect_part(broken([](auto& facts) { facts.erase("position"); }), "position");
  expect_part(broken([](auto& facts) { facts["seed"] = "x"; }), "\"seed\" must be a whole number");
  expect_part(broken([](auto& facts) { facts["compute_dtype"] = "i32"; }),
              "unknown compute dtype \"i32\"");
  expect_part(broken([](auto& facts) { facts["position"]["updates"] = -1; }),
              "\"updates\" must be a whole number from 0");
  expect_part(broken([](auto& facts) { facts["ordered_samples"] = 0; }),
              "\"ordered_samples\" must be a whole number from 1");
  expect_part(broken([](auto& facts) { facts["best"].erase("loss"); }), "loss");
  expect_part(broken([](auto& facts) { facts.erase("schedules"); }), "schedules");
  expect_part(broken([](auto& facts) { facts["schedules"]["learning_rate"]["style"] = "flat"; }),
              "there is no style \"flat\"");
  expect_part(broken([](auto& facts) { facts["model"]["activation"] = "swish"; }),
              "\"activation\" has a value of the wrong type");
}

// The JSON library's own conversions would cut these down to numbers that look right.
TEST_F(BrokenFacts, NumbersThatDoNotFitAreRefused) {
  expect_part(broken([](auto& facts) { facts["seq_length"] = (int64_t{1} << 32) + 16; }),
              "\"seq_length\" must be a whole number from 1");
  expect_part(broken([](auto& facts) { facts["position"]["step"] = 1e300; }), "\"step\"");
  expect_part(broken([](auto& facts) { facts["position"]["step"] = true; }), "\"step\"");
  expect_part(broken([](auto& facts) { facts["position"]["consumed_samples"] = INT64_MAX; }),
              "\"consumed_samples\"");
  expect_part(broken([](auto& facts) { facts["position"]["skipped_in_row"] = -1; }),
              "\"skipped_in_row\"");
  expect_part(broken([](auto& facts) { facts["best"]["step"] = 1e300; }), "\"step\"");
  expect_part(
      broken([](auto& facts) { facts["schedules"]["learning_rate"]["decay_samples"] = INT64_MAX; }),
      "\"decay_samples\"");
  expect_part(broken([](auto& facts) { facts["seed"] = -1; }), "\"seed\"");
  expect_part(broken([](auto& facts) { facts["model"]["hidden_size"] = (int64_t{1} << 32) + 64; }),
              "\"hidden_size\" must be a whole number");
  expect_part(broken([](auto& facts) { facts["model"]["num_layers"] = 1e300; }), "\"num_layers\"");
  expect_part(broken([](auto& facts) { facts["model"]["norm_epsilon"] = true; }),
              "\"norm_epsilon\" has a value of the wrong type");
  expect_part(broken([](auto& facts) { facts["model"]["moe_layers"] = {1, 0}; }), "\"moe_layers\"");
  expect_part(broken([](auto& facts) { facts["model"] = {1, 2}; }), "not a JSON object");
}

TEST_F(StoredRunTest, AnotherShapeOfModelIsRefusedByTensor) {
  round_trip(identity_of(saved_model(), DType::f32));
  ModelConfig wider = saved_model();
  wider.vocab_size += 1;
  const StepRun run(wider, {.dtype = DType::f32});
  expect_part(
      refusal(
          ExitStatus::bad_request,
          [&] { load_training_state(Checkpoint::open(path), run.config, run.state, run.storage); }),
      "embedding");
}

}  // namespace
}  // namespace troupe
