// What the routers of a whole training step do beside choosing experts: what their losses count,
// over which micro-batches, and what a skipped step leaves of the expert bias. One rank and many
// have these from the same code, so comparing layouts shows none of it.
#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "ops/count_experts/count_experts.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/router_topk/router_topk.h"
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
