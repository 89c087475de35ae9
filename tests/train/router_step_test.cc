// What the routers of a whole training step do beside choosing experts: what their losses count,
// over which micro-batches, and what a skipped step leaves of the expert bias. One rank and many
// have these from the same code, so comparing layouts shows none of it.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/routing/count_experts/count_experts.h"
#include "ops/routing/router_topk/router_topk.h"
#include "program/op_spec.h"
#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

ModelConfig sigmoid_model() {
  ModelConfig config = trained_model();
  config.num_experts = 8;
  config.moe_router_score_function = ScoreFunction::sigmoid;
  return config;
}

const Op& producer_of(const Program& program, ValueId id) {
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const auto outputs = program.outputs(program.op(index));
    if (std::find(outputs.begin(), outputs.end(), id) != outputs.end()) return program.op(index);
  }
  TROUPE_CHECK(false, "no operation makes " + program.value(id).name);
}

// The counts of load-balancing losses are of the best scores: an expert bias and groups change who
// is chosen, not what the loss is to balance.
TEST(RouterLosses, CountTheBestScoresAlone) {
  ModelConfig biased = sigmoid_model();
  biased.moe_router_enable_expert_bias = true;
  ModelConfig grouped = sigmoid_model();
  grouped.moe_router_num_groups = 4;
  grouped.moe_router_group_topk = 2;
  for (const ModelConfig& config : {biased, grouped}) {
    SCOPED_TRACE(config.moe_router_num_groups > 0 ? "groups" : "expert bias");
    const StepRun run(config, {});
    const Program& program = *run.step.program;
    int losses = 0;
    for (int32_t index = 0; index < program.op_count(); ++index) {
      const Op& op = program.op(index);
      if (op.spec != &kLoadBalancingLoss) continue;
      ++losses;
      const Op& counts = producer_of(program, program.inputs(op)[1]);
      ASSERT_EQ(counts.spec, &kCountExperts);
      const Op& choice = producer_of(program, program.inputs(counts)[0]);
      ASSERT_EQ(choice.spec, &kRouterTopk);
      EXPECT_EQ(program.inputs(choice)[0], program.inputs(op)[0]) << "the logits";
      EXPECT_FALSE(program.inputs(choice)[1].valid()) << "the expert bias";
      EXPECT_EQ(choice.attributes.as<RouterTopkAttributes>().num_groups, 0);
      EXPECT_EQ(choice.attributes.as<RouterTopkAttributes>().top_k, config.moe_router_topk);
    }
    EXPECT_EQ(losses, config.num_layers);
  }
}

// The bias of an expert that no score reaches is in every choice of every layer.
TEST(ExpertBias, ChoosesWhatTheScoresDoNot) {
  constexpr int kFavourite = 5;
  ModelConfig config = sigmoid_model();
  config.moe_router_enable_expert_bias = true;
  for (const bool is_favoured : {false, true}) {
    StepRun run(config, {});
    for (const StateId id : run.state.expert_biases) {
      if (is_favoured) run.storage.view(id).as<float>()[kFavourite] = 10;
    }
    run.update();
    ASSERT_EQ(run.step.layers.size(), static_cast<size_t>(config.num_layers));
    for (const LayerMetrics& layer : run.step.layers) {
      const auto* const counts = run.interpreter.view(layer.counts).as<double>();
      const double tokens =
          std::accumulate(counts, counts + config.num_experts, 0.0) / config.moe_router_topk;
      EXPECT_EQ(counts[kFavourite] == tokens, is_favoured) << "layer " << layer.layer;
    }
  }
}

// What changes a layer's state in the step's end says so: times and texts go by layers.
TEST(ExpertBias, UpdatesStandInTheirLayers) {
  ModelConfig config = sigmoid_model();
  config.moe_router_enable_expert_bias = true;
  const StepRun run(config, {});
  IdVector<StateId, int32_t> layers(run.state.table->size(), -2);
  for (size_t layer = 0; layer < run.state.expert_biases.size(); ++layer) {
    layers[run.state.expert_biases[layer]] = static_cast<int32_t>(layer);
  }
  for (const Parameter& parameter : run.state.parameters) layers[parameter.value] = parameter.layer;
  const Program& program = *run.step.program;
  int updates = 0;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    for (const ValueId id : program.outputs(op)) {
      const Value& value = program.value(id);
      if (value.role != Role::parameter && value.role != Role::router_state) continue;
      EXPECT_EQ(op.place.layer, layers[value.state]) << value.name;
      ++updates;
    }
  }
  EXPECT_EQ(updates, static_cast<int>(run.state.parameters.size()) + config.num_layers);
}

// A global loss compares a micro-batch with the mean of those up to it. Of micro-batches that are
// all alike that mean is each of them.
TEST(RouterLosses, OfTheStepAreOverTheMeanOfItsMicroBatches) {
  ModelConfig config = trained_model();
  config.moe_aux_loss_coeff = 0;
  config.moe_global_aux_loss_coeff = 0.5;
  const auto global_loss = [](const StepRun& run) {
    std::vector<double> losses;
    for (const LayerMetrics& layer : run.step.layers) {
      for (const LayerMetrics::Loss& loss : layer.losses) {
        if (loss.kind != AuxiliaryLossKind::global_load_balancing) continue;
        losses.push_back(*run.interpreter.view(loss.value).as<double>());
      }
    }
    return losses;
  };
  StepRun one(config, {});
  StepRun four(config, {.micro_batches = 4});
  for (size_t i = 0; i < 4; ++i) four.write_micro_batch(i, 0);
  one.update();
  four.update();
  const std::vector<double> expected = global_loss(one);
  const std::vector<double> found = global_loss(four);
  ASSERT_EQ(expected.size(), static_cast<size_t>(config.num_layers));
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_GT(expected[i], 0.1);
    EXPECT_NEAR(found[i], expected[i], 1e-14 * expected[i]);  // a mean of four equal numbers
  }
}

struct PaddingCase {
  const char* name;
  ModelConfig config;
  bool per_token_loss = false;
};

std::vector<PaddingCase> padding_cases() {
  ModelConfig aux = trained_model();
  aux.moe_aux_loss_coeff = 0.5;
  aux.moe_z_loss_coeff = 0.1;
  ModelConfig sequences = aux;
  sequences.moe_aux_loss_coeff = 0;
  sequences.moe_seq_aux_loss_coeff = 0.5;
  ModelConfig global = sigmoid_model();
  global.moe_aux_loss_coeff = 0;
  global.moe_global_aux_loss_coeff = 0.5;
  global.moe_router_enable_expert_bias = true;
  global.moe_router_bias_update_rate = 0.05;
  ModelConfig wide = aux;
  wide.moe_router_fp64 = true;
  return {{"aux_and_z_loss", aux},
          {"seq_aux_loss", sequences},
          {"global_aux_loss_and_bias", global},
          {"per_token", aux, true},
          {"per_token_fp64_router", wide, true}};
}

class Padding : public ::testing::TestWithParam<PaddingCase> {};

// What a step with padding leaves behind, which is at the end of sequences and has no label.
std::vector<std::vector<double>> step_with_padding(const PaddingCase& each, bool ignored,
                                                   int32_t padding_id) {
  StepRun run(
      each.config,
      {.micro_batch_size = 2, .micro_batches = 3, .change = [&](TrainingStepOptions& options) {
         options.ignore_padding = ignored;
         options.per_token_loss = each.per_token_loss;
       }});
  int32_t valid = 0;
  for (size_t i = 0; i < run.step.micro_batches.size(); ++i) {
    const BatchValues& batch = run.step.micro_batches[i];
    EXPECT_EQ(batch.valid.mask.valid(), ignored);
    for (int32_t row = 0; row < batch.batch; ++row) {
      // 12, 9, 6, 4, 2 and no tokens.
      constexpr int32_t kTokens[] = {12, 9, 6, 4, 2, 0};
      const int32_t own = kTokens[2 * i + static_cast<size_t>(row)];
      valid += own;
      for (int32_t position = 0; position < batch.sequence; ++position) {
        const int64_t at = int64_t{row} * batch.sequence + position;
        const bool padding = position >= own;
        if (ignored) run.interpreter.view(batch.valid.mask).as<int32_t>()[at] = padding ? 0 : 1;
        if (!padding) continue;
        run.interpreter.view(batch.tokens).as<int32_t>()[at] = padding_id + position % 3;
        set_element(run.interpreter.view(batch.mask), at, 0);
      }
    }
  }
  run.update();
  EXPECT_FALSE(run.skipped());
  std::vector<std::vector<double>> left = {{run.loss(), run.grad_norm()}};
  for (const LayerMetrics& layer : run.step.layers) {
    left.push_back(elements(run.interpreter.view(layer.counts)));
    left.push_back(elements(run.interpreter.view(layer.entropy)));
    for (const LayerMetrics::Loss& loss : layer.losses) {
      left.push_back(elements(run.interpreter.view(loss.value)));
    }
    EXPECT_EQ(layer.tokens.valid(), ignored);
    if (!ignored) continue;
    EXPECT_EQ(elements(run.interpreter.view(layer.tokens)), std::vector<double>{1.0 * valid});
    double rows = 0;
    for (const double count : elements(run.interpreter.view(layer.counts))) rows += count;
    EXPECT_EQ(rows, valid * each.config.moe_router_topk);
  }
  for (const Parameter& parameter : run.state.parameters) {
    left.push_back(elements(run.storage.view(parameter.gradient)));
  }
  for (const StateId id : run.state.expert_biases) {
    if (id.valid()) left.push_back(elements(run.storage.view(id)));
  }
  return left;
}

// Whatever stands where padding is, no later token sees it, and it has no label: ignored, it
// changes nothing. Otherwise it changes the routers' losses, and with them the gradients.
TEST_P(Padding, ChangesNothingWhenItIsIgnored) {
  const auto one = step_with_padding(GetParam(), /*ignored=*/true, 5);
  const auto other = step_with_padding(GetParam(), /*ignored=*/true, 70);
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].size(), other[i].size());
    double largest = 0;
    for (const double value : one[i]) largest = std::max(largest, std::abs(value));
    for (size_t at = 0; at < one[i].size(); ++at) {
      // f64: products of matrices have other zeros in other places of their sums.
      ASSERT_NEAR(one[i][at], other[i][at], 1e-12 * largest) << i << " " << at;
    }
  }
  const auto counted = step_with_padding(GetParam(), /*ignored=*/false, 5);
  const auto otherwise = step_with_padding(GetParam(), /*ignored=*/false, 70);
  EXPECT_NEAR(counted[0][0], otherwise[0][0], 1e-12 * counted[0][0]) << "the loss of the model";
  EXPECT_GT(std::abs(counted[0][1] - otherwise[0][1]), 1e-6 * counted[0][1]) << "the gradients";
}

INSTANTIATE_TEST_SUITE_P(Losses, Padding, ::testing::ValuesIn(padding_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// With a loss per token, each valid token has the same weight in the routers' losses: the z-loss of
// the step is that of its tokens, whichever micro-batch they are in.
TEST(RouterLosses, PerTokenWeighMicroBatchesByTheirValidTokens) {
  ModelConfig config = trained_model();
  config.moe_aux_loss_coeff = 0;
  config.moe_z_loss_coeff = 0.5;
  const auto gradients = [&](int32_t micro_batch_size, int32_t micro_batches) {
    StepRun run(config, {.micro_batch_size = micro_batch_size,
                         .micro_batches = micro_batches,
                         .change = [](TrainingStepOptions& options) {
                           options.ignore_padding = true;
                           options.per_token_loss = true;
                         }});
    for (const BatchValues& batch : run.step.micro_batches) {
      for (int64_t at = 0; at < batch.batch * batch.sequence; ++at) {
        const bool first = &batch == &run.step.micro_batches.front() && at < batch.sequence;
        run.interpreter.view(batch.valid.mask).as<int32_t>()[at] =
            first || at % batch.sequence < 3 ? 1 : 0;
      }
    }
    run.update();
    std::vector<std::vector<double>> all;
    for (const Parameter& parameter : run.state.parameters) {
      all.push_back(elements(run.storage.view(parameter.gradient)));
    }
    return all;
  };
  const auto one = gradients(2, 1);
  const auto two = gradients(1, 2);
  for (size_t i = 0; i < one.size(); ++i) {
    double largest = 0;
    for (const double value : one[i]) largest = std::max(largest, std::abs(value));
    for (size_t at = 0; at < one[i].size(); ++at) {
      ASSERT_NEAR(one[i][at], two[i][at], 1e-12 * largest) << i << " " << at;  // as above
    }
  }
}

TEST(ExpertBias, StaysInASkippedStep) {
  ModelConfig config = sigmoid_model();
  config.moe_router_enable_expert_bias = true;
  config.moe_router_bias_update_rate = 0.05;
  StepRun run(config, {.micro_batches = 2});
  const auto biases = [&] {
    std::vector<double> all;
    for (const StateId id : run.state.expert_biases) {
      for (const double value : elements(run.storage.view(id))) all.push_back(value);
    }
    return all;
  };
  const std::vector<double> initial = biases();
  run.update(1);
  ASSERT_FALSE(run.skipped());
  const std::vector<double> moved = biases();
  ASSERT_NE(moved, initial);
  const TensorView mask = run.interpreter.view(run.step.micro_batches[0].mask);
  set_element(mask, 4, std::numeric_limits<double>::quiet_NaN());
  run.update(2);
  ASSERT_TRUE(run.skipped());
  EXPECT_EQ(biases(), moved);
  set_element(mask, 4, 1);
  run.update(2);
  ASSERT_FALSE(run.skipped());
  EXPECT_NE(biases(), moved) << "the step after it is an ordinary one";
}

}  // namespace
}  // namespace troupe::testing
