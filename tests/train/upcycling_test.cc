// Upcycled models: that they compute what the dense model does, the values that their experts and
// routers have, and that every layout has the same ones.
#include "train/upcycling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/hf_config.h"
#include "passes/inference_programs.h"
#include "support/errors.h"
#include "support/layout_run.h"
#include "support/slice_elements.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using testing::element;
using testing::elements;
using testing::expect_phrase;
using testing::message_of;

constexpr uint64_t kSeed = 7;

struct UpcyclingCase {
  std::string name = {};
  std::string fixture = "llama_dense";
  int32_t granularity = 1;
  int32_t experts = 4;
  int32_t top_k = 2;
  std::function<void(ModelConfig&)> change = {};
};

std::string folder_of(const UpcyclingCase& wanted) {
  return TROUPE_FIXTURE_DIR "/hf/" + wanted.fixture;
}

ModelConfig with_experts(const UpcyclingCase& wanted) {
  ModelConfig config = read_hf_config(folder_of(wanted) + "/config.json");
  config.num_experts = wanted.experts;
  config.moe_router_topk = wanted.top_k;
  config.moe_ffn_hidden_size = config.ffn_hidden_size / wanted.granularity;
  config.moe_layers.assign(static_cast<size_t>(config.num_layers), true);
  if (wanted.change) wanted.change(config);
  return config;
}

// A rank's upcycled state.
struct Upcycled {
  Upcycled(const UpcyclingCase& wanted, DType dtype, const ModelPart* part = nullptr)
      : config(with_experts(wanted)),
        state(part == nullptr ? declare_model_state(config, dtype, /*trained=*/true)
                              : declare_model_state(config, dtype, /*trained=*/true, *part)),
        storage(state.table) {
    upcycle(find_model(folder_of(wanted), dtype), wanted.granularity, kSeed, state, storage);
  }

  const Parameter& find(const std::string& name) const {
    return *std::find_if(state.parameters.begin(), state.parameters.end(),
                         [&](const Parameter& each) { return each.full_name() == name; });
  }

  ModelConfig config;
  ModelState state;
  StateStorage storage;
};

std::vector<double> logits_of(const ModelConfig& config, const ModelState& state,
                              const StateStorage& storage) {
  constexpr int32_t kBatch = 2;
  constexpr int32_t kSequence = 24;
  const InferenceStep step =
      build_logits_step(config, state, kBatch, kSequence, /*with_loss=*/false);
  ThreadPool pool(1);
  const auto interpreter = make_interpreter(
      *step.program, plan_memory(*step.program, 1, Device::cpu), storage, pool, {}, {});
  auto* const tokens = interpreter->view(step.batch.tokens).as<int32_t>();
  for (int32_t i = 0; i < kBatch * kSequence; ++i) tokens[i] = i * 37 % config.vocab_size;
  interpreter->run();
  return elements(interpreter->view(step.logits));
}

std::vector<double> dense_logits(const UpcyclingCase& wanted, DType dtype) {
  const SavedModel dense = find_model(folder_of(wanted), dtype);
  const ModelState state = declare_model_state(dense.config, dtype, /*trained=*/false);
  const StateStorage storage(state.table);
  load_saved_model(dense, state, storage);
  return logits_of(dense.config, state, storage);
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

class ExactUpcycling : public ::testing::TestWithParam<UpcyclingCase> {};

// The factors' roots and the routers' weights are rounded, in f64 by 1e-16, and sums have another
// order; logits are of the order of 1. In f32 the same rounding is 6e-8 of each of some hundred
// terms: the promise is 1e-5.
TEST_P(ExactUpcycling, ComputesWhatTheDenseModelDoes) {
  ASSERT_TRUE(starts_as_dense(with_experts(GetParam())));
  for (const DType dtype : {DType::f64, DType::f32}) {
    const Upcycled moe(GetParam(), dtype);
    const std::vector<double> dense = dense_logits(GetParam(), dtype);
    EXPECT_GT(*std::max_element(dense.begin(), dense.end()), 0.1) << "nothing was compared";
    EXPECT_LE(largest_difference(logits_of(moe.config, moe.state, moe.storage), dense),
              dtype == DType::f64 ? 1e-13 : 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, ExactUpcycling,
    ::testing::Values(
        UpcyclingCase{.name = "copies"},
        UpcyclingCase{.name = "norms_of_heads", .fixture = "qwen3_dense"},
        UpcyclingCase{.name = "halves", .granularity = 2, .experts = 8, .top_k = 4},
        UpcyclingCase{.name = "one_copy_of_four", .granularity = 4, .experts = 8, .top_k = 4},
        UpcyclingCase{.name = "sigmoid_scaled",
                      .granularity = 2,
                      .experts = 8,
                      .top_k = 6,
                      .change =
                          [](ModelConfig& config) {
                            config.moe_router_score_function = ScoreFunction::sigmoid;
                            config.moe_router_topk_scaling_factor = 2.5;
                          }},
        // All experts are chosen: softmax before top-k sums to 1, too.
        UpcyclingCase{.name = "all_experts",
                      .granularity = 2,
                      .experts = 4,
                      .top_k = 4,
                      .change = [](ModelConfig& config) { config.moe_router_pre_softmax = true; }},
        UpcyclingCase{.name = "one_dense_layer",
                      .granularity = 2,
                      .top_k = 2,
                      .change = [](ModelConfig& config) { config.moe_layers[0] = false; }}),
    [](const auto& info) { return info.param.name; });

// With a router that prefers none, the weights' sum is what the factors were made for. The logits
// of the router are 0 here.
TEST(Upcycling, IsExactWithoutPreferencesWhereTheSumIsNotFixed) {
  const auto check = [](const std::string& name, int32_t top_k,
                        const std::function<void(ModelConfig&)>& change) {
    const UpcyclingCase wanted{
        .name = name, .granularity = 2, .experts = 8, .top_k = top_k, .change = change};
    const Upcycled moe(wanted, DType::f64);
    EXPECT_FALSE(starts_as_dense(moe.config)) << name;
    for (const Parameter& parameter : moe.state.parameters) {
      if (parameter.name != "w_router") continue;
      const TensorView view = moe.storage.view(parameter.value);
      std::fill_n(view.as<double>(), view.shape.elements(), 0.0);
    }
    EXPECT_LE(largest_difference(logits_of(moe.config, moe.state, moe.storage),
                                 dense_logits(wanted, DType::f64)),
              1e-13)
        << name;
  };
  check("softmax", 4, [](ModelConfig& config) { config.moe_router_pre_softmax = true; });
  check("sigmoid", 4, [](ModelConfig& config) {
    config.moe_router_score_function = ScoreFunction::sigmoid;
    config.moe_router_normalize_scores = false;
    config.moe_router_topk_scaling_factor = 1.5;
  });
  check("sqrtsoftplus", 2, [](ModelConfig& config) {
    config.moe_router_score_function = ScoreFunction::sqrtsoftplus;
    config.moe_router_normalize_scores = false;
  });
  // Scores of sinkhorn are not scaled.
  check("sinkhorn", 2, [](ModelConfig& config) {
    config.moe_router_sinkhorn = true;
    config.moe_router_topk_scaling_factor = 3;
  });
}

TEST(Upcycling, RowsOfTheRouterAreRandomAndTheSameWithinACopy) {
  const Upcycled moe({.granularity = 2, .experts = 8, .top_k = 4}, DType::f32);
  const Parameter& router = moe.find("layers.1.w_router");
  const std::vector<double> values = elements(moe.storage.view(router.value));
  const int64_t hidden = router.whole_shape[1];
  for (int64_t expert = 0; expert < 8; ++expert) {
    for (int64_t i = 0; i < hidden; ++i) {
      EXPECT_EQ(values[static_cast<size_t>(expert * hidden + i)],
                static_cast<float>(initial_value(router, kSeed, expert / 2 * hidden + i)));
    }
  }
}

// Also in the master weights, which have the values before they are rounded.
TEST(Upcycling, ExpertsAreScaledPartsOfTheDenseNetwork) {
  const UpcyclingCase wanted{.granularity = 2, .experts = 4, .top_k = 2};
  const SavedModel dense = find_model(folder_of(wanted), DType::f32);
  const ModelState dense_state = declare_model_state(dense.config, DType::f32, /*trained=*/false);
  const StateStorage dense_storage(dense_state.table);
  load_saved_model(dense, dense_state, dense_storage);
  const auto dense_view = [&](const std::string& name) {
    return dense_storage.view(
        std::find_if(dense_state.parameters.begin(), dense_state.parameters.end(),
                     [&](const Parameter& each) { return each.full_name() == name; })
            ->value);
  };
  const Upcycled moe(wanted, DType::bf16);
  const int64_t hidden = moe.config.hidden_size;
  const int64_t width = moe.config.moe_ffn_hidden_size;
  const auto expect_values = [&](const std::string& name, const auto& dense_value) {
    const Parameter& parameter = moe.find(name);
    for (int64_t i = 0; i < parameter.whole_shape.elements(); ++i) {
      const auto value = static_cast<float>(dense_value(i));
      ASSERT_EQ(element(moe.storage.view(parameter.master), i), value) << name << ", element " << i;
      ASSERT_EQ(element(moe.storage.view(parameter.value), i), static_cast<float>(bf16(value)));
    }
  };
  const double root = std::sqrt(2.0);
  expect_values("layers.0.w_gate_up", [&, from = dense_view("layers.0.w_gate_up")](int64_t i) {
    const int64_t expert = i / hidden / (2 * width);
    const int64_t half = i / hidden / width % 2;
    const int64_t row = half * 2 * width + expert % 2 * width + i / hidden % width;
    return element(from, row * hidden + i % hidden) * (half == 1 ? root : 1);
  });
  expect_values("layers.0.w_down", [&, from = dense_view("layers.0.w_down")](int64_t i) {
    const int64_t expert = i / width / hidden;
    const int64_t column = expert % 2 * width + i % width;
    return element(from, i / width % hidden * 2 * width + column) * (2 / root);
  });
  expect_values("layers.1.w_attention_out", [&, from = dense_view("layers.1.w_attention_out")](
                                                int64_t i) { return element(from, i); });
}

// Every rank of every layout has its slices of the one upcycled model, bit for bit.
TEST(Upcycling, EveryLayoutHasTheSameModel) {
  const UpcyclingCase wanted{.granularity = 2, .experts = 8, .top_k = 4};
  const Upcycled whole(wanted, DType::bf16);
  const auto layout_case = [&](const std::string& name, const LayoutOptions& options) {
    testing::LayoutCase layout;
    layout.name = name;
    layout.model = whole.config;
    layout.layout = options;
    layout.dtype = DType::bf16;
    return layout;
  };
  std::vector<testing::LayoutCase> layouts = {
      layout_case("ep4_tp2", {.world_size = 8,
                              .tensor_parallel = 2,
                              .expert_parallel = 4,
                              .expert_tensor_parallel = 1}),
      layout_case(
          "etp2_ep2_pp2",
          {.world_size = 8, .tensor_parallel = 2, .pipeline_parallel = 2, .expert_parallel = 2}),
      layout_case("sharded_optimizer", {.world_size = 2}),
      layout_case("ep2_fsdp", {.world_size = 4, .expert_parallel = 2}),
      layout_case("shards_within_rows", {.world_size = 10, .expert_parallel = 2})};
  layouts[2].sharding = StateSharding::optimizer;
  layouts[3].sharding = layouts[4].sharding = StateSharding::parameters;
  for (const testing::LayoutCase& layout : layouts) {
    const auto run = testing::run_layout_of(layout);
    int64_t compared = 0;
    for (int32_t rank = 0; rank < layout.layout.world_size; ++rank) {
      const ModelPart part{.run = run, .rank = rank};
      const Upcycled own(wanted, DType::bf16, &part);
      for (const Parameter& parameter : own.state.parameters) {
        const Parameter& one = whole.state.get(parameter.id);
        const auto expect_same = [&](StateId id, StateId of_whole, const IndexRange& range) {
          if (!id.valid()) return;
          testing::for_each_element(parameter, [&](int64_t at, int64_t in_whole) {
            if (at < range.begin || at >= range.end) return;
            ++compared;
            ASSERT_EQ(element(own.storage.view(id), at - range.begin),
                      element(whole.storage.view(of_whole), in_whole))
                << layout.name << ", rank " << rank << ": " << parameter.full_name();
          });
        };
        expect_same(parameter.value, one.value, parameter.held);
        expect_same(parameter.master, one.master, parameter.shard);
      }
    }
    EXPECT_GT(compared, 0) << layout.name;
  }
}

// Except for what says how experts are chosen, which a dense model does not look at.
TEST(Upcycling, TheDenseModelIsTheOneThatTheExpertsAreMadeOf) {
  const UpcyclingCase wanted{.granularity = 2};
  const ModelConfig with = with_experts(wanted);
  ModelConfig expected = read_hf_config(folder_of(wanted) + "/config.json");
  expected.moe_router_topk = with.moe_router_topk;
  expected.moe_ffn_hidden_size = with.moe_ffn_hidden_size;
  EXPECT_TRUE(dense_model_of(with, 2) == expected);
}

TEST(Upcycling, StartsAsTheDenseModelWhereTheWeightsHaveAFixedSum) {
  const auto starts = [](ScoreFunction score, int32_t top_k, bool before, bool normalised) {
    ModelConfig config = with_experts({.top_k = top_k});
    config.moe_router_score_function = score;
    config.moe_router_pre_softmax = before;
    config.moe_router_normalize_scores = normalised;
    const bool result = starts_as_dense(config);
    config.moe_router_sinkhorn = true;
    EXPECT_FALSE(starts_as_dense(config));
    return result;
  };
  EXPECT_TRUE(starts(ScoreFunction::softmax, 1, false, false));
  EXPECT_TRUE(starts(ScoreFunction::softmax, 2, false, false));
  EXPECT_FALSE(starts(ScoreFunction::softmax, 3, true, false));
  EXPECT_TRUE(starts(ScoreFunction::softmax, 4, true, false)) << "all experts";
  EXPECT_FALSE(starts(ScoreFunction::sigmoid, 2, false, false));
  EXPECT_TRUE(starts(ScoreFunction::sigmoid, 2, false, true));
  EXPECT_FALSE(starts(ScoreFunction::sigmoid, 1, false, true)) << "one score is not normalised";
}

TEST(Upcycling, SaysHowManyLayersAreDone) {
  const UpcyclingCase wanted{};
  const ModelConfig config = with_experts(wanted);
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/true);
  const StateStorage storage(state.table);
  std::vector<std::pair<uint64_t, uint64_t>> said;
  upcycle(find_model(folder_of(wanted), DType::f32), 1, kSeed, state, storage,
          [&](uint64_t done, uint64_t all) { said.emplace_back(done, all); });
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(said, (std::vector<std::pair<uint64_t, uint64_t>>{{0, 2}, {1, 2}}));
}

TEST(Upcycling, RefusesWhatHasNoDenseModel) {
  const auto refusal = [](const UpcyclingCase& wanted) {
    return message_of(ExitStatus::bad_request, [&] { Upcycled(wanted, DType::f32); });
  };
  expect_phrase(refusal({.granularity = 2, .experts = 5, .top_k = 2}),
                "--num-experts (5) and --moe-router-topk (2) must be multiples of "
                "--moe-upcycling-granularity (2)");
  expect_phrase(refusal({.granularity = 2, .experts = 4, .top_k = 3}), "--moe-router-topk (3)");
  expect_phrase(
      refusal(
          {.change = [](ModelConfig& config) { config.moe_shared_expert_intermediate_size = 24; }}),
      "Leave --moe-shared-expert-intermediate-size out");
  expect_phrase(refusal({.change = [](ModelConfig& config) { config.moe_ffn_hidden_size = 40; }}),
                "llama_dense has an inner size of 72, and 1 x --moe-ffn-hidden-size 40 is 40");
  expect_phrase(refusal({.change =
                             [](ModelConfig& config) {
                               config.moe_ffn_hidden_size = 40;
                               config.moe_layers[0] = false;
                             }}),
                "inner size of 72, and --moe-ffn-hidden-size 40 times --moe-upcycling-granularity "
                "1 is 40");
  expect_phrase(refusal({.fixture = "mixtral",
                         .change = [](ModelConfig& config) { config.moe_ffn_hidden_size = 40; }}),
                "mixtral has experts already");
  ModelConfig with_prediction = with_experts({});
  with_prediction.mtp_num_layers = 1;
  expect_phrase(message_of(ExitStatus::bad_request, [&] { dense_model_of(with_prediction, 1); }),
                "Leave --mtp-num-layers out");
  ModelConfig dense = with_experts({});
  dense.num_experts = 0;
  expect_phrase(message_of(ExitStatus::bad_request, [&] { dense_model_of(dense, 1); }),
                "Say how many it gets");
}

}  // namespace
}  // namespace troupe
