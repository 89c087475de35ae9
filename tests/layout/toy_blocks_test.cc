// A mixer and a feed-forward that the program does not have, each made in this file alone: what a
// new kind of layer needs, and that layouts, recompute, sharding and pipelines follow from what it
// declares.
#include <cmath>
#include <gtest/gtest.h>
#include <memory>

#include "model/layout_rules.h"
#include "model/model.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/row_gate/row_gate.h"
#include "ops/products/linear/linear.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// Attention of as many keys as queries, without positions.
class ToyMixer : public LayerBlock {
 public:
  ToyMixer(ParameterList& parameters, int32_t hidden, int32_t layer)
      : LayerBlock(layer), hidden_(hidden) {
    const int64_t size = kHeads * kHeadSize;
    const CutSection heads{.size = size, .units = kHeads};
    w_in_ = parameters.weight("w_toy_in", {3 * size, hidden},
                              {.cuts = {{.sections = {heads, heads, heads}}}});
    w_out_ = parameters.weight(
        "w_toy_out", {hidden, size},
        {.cuts = {{.dimension = 1, .sections = {heads}}}, .is_into_stream = true});
  }

  ValueId build(const BlockContext& context, ValueId input) const override {
    const TensorParallel ranks(context.builder, context.part());
    const ValueId rows = ranks.enter(input, "toy_in_all");
    const ValueId qkv = linear(context.builder, rows, context.parameter(w_in_), {}, "toy_qkv");
    const int32_t heads = kHeads / ranks.ranks();
    const ValueId mixed =
        attend_over_context(context.builder, context.part(), context.options.context_exchange,
                            {qkv, qkv}, {.starts = context.batch.starts},
                            {.batch = context.batch.batch,
                             .sequence = context.batch.sequence,
                             .heads = heads,
                             .groups = heads,
                             .head_dim = kHeadSize,
                             .scale = 0.5},
                            "toy_mixed");
    return leave_linear(context.builder, ranks, mixed, context.parameter(w_out_), {}, "toy_out");
  }

  double forward_flops(int64_t sequence) const override {
    const double size = kHeads * kHeadSize;
    return 2.0 * size * (4.0 * hidden_ + static_cast<double>(sequence));
  }

  std::optional<Refusal> check_layout(const Layout& layout, ContextExchange) const override {
    return require_divisor(Setting::tensor_parallel, layout.tp(), kHeads, "the toy's heads");
  }

 private:
  static constexpr int32_t kHeads = 4;
  static constexpr int32_t kHeadSize = 4;
  const int32_t hidden_;
  ParameterId w_in_;
  ParameterId w_out_;
};

// Two products with a gate of one number for each token, the same on all ranks of tp.
class ToyFeedForward : public LayerBlock {
 public:
  ToyFeedForward(ParameterList& parameters, int32_t hidden, int32_t layer)
      : LayerBlock(layer), hidden_(hidden) {
    w_up_ = parameters.weight("w_toy_up", {kWidth, hidden},
                              {.cuts = {cut_anywhere(0, CutOver::tp, kWidth, "the toy's width")}});
    w_down_ = parameters.weight("w_toy_down", {hidden, kWidth},
                                {.cuts = {cut_anywhere(1, CutOver::tp, kWidth, "the toy's width")},
                                 .is_into_stream = true});
    w_gate_ =
        parameters.weight("w_toy_gate", {1, hidden}, {.gradient_class = GradientClass::replicated});
  }

  ValueId build(const BlockContext& context, ValueId input) const override {
    Builder& builder = context.builder;
    const TensorParallel ranks(builder, context.part());
    const ValueId rows = ranks.enter(input, "toy_ffn_in_all");
    const ValueId up = linear(builder, rows, context.parameter(w_up_), {}, "toy_up");
    const ValueId activated = activation(
        builder, up, {}, {}, {.function = ActivationFunction::squared_relu, .gated = false}, "toy");
    const ValueId out =
        leave_linear(builder, ranks, activated, context.parameter(w_down_), {}, "toy_down");
    const ValueId gate = linear(builder, input, context.parameter(w_gate_), {}, "toy_gate");
    return row_gate(builder, out, gate, "toy_gated");
  }

  double forward_flops(int64_t) const override { return 4.0 * hidden_ * kWidth; }

  std::optional<Refusal> check_layout(const Layout& layout, ContextExchange) const override {
    return require_divisor(Setting::tensor_parallel, layout.tp(), kWidth, "the toy's width");
  }

 private:
  static constexpr int32_t kWidth = 12;
  const int32_t hidden_;
  ParameterId w_up_;
  ParameterId w_down_;
  ParameterId w_gate_;
};

// Every second layer has the toys; the others what the configuration says.
BlockMakers with_toys() {
  const BlockMakers plain = blocks_of_config();
  const auto every_second = [](const BlockMaker& other, const BlockMaker& toy) {
    return [=](ParameterList& parameters, const ModelConfig& config, int32_t layer) {
      return (layer % 2 == 0 ? toy : other)(parameters, config, layer);
    };
  };
  return {
      .mixer = every_second(plain.mixer,
                            [](ParameterList& list, const ModelConfig& config, int32_t layer) {
                              return std::make_unique<const ToyMixer>(list, config.hidden_size,
                                                                      layer);
                            }),
      .feed_forward = every_second(
          plain.feed_forward, [](ParameterList& list, const ModelConfig& config, int32_t layer) {
            return std::make_unique<const ToyFeedForward>(list, config.hidden_size, layer);
          })};
}

LayoutCase toy_case() {
  LayoutCase c;
  c.model = moe_model(4);
  c.blocks = with_toys();
  c.micro_batches = 2;
  return c;
}

TEST(ToyBlocks, LayoutsEqualOneRank) {
  LayoutCase sliced = toy_case();
  sliced.layout.world_size = 4;
  sliced.layout.tensor_parallel = 2;
  sliced.layout.expert_parallel = 2;
  sliced.layout.sequence_parallel = true;
  LayoutCase pipeline = toy_case();
  pipeline.layout.world_size = 4;
  pipeline.layout.pipeline_parallel = 2;
  pipeline.layout.context_parallel = 2;
  pipeline.recompute = {.granularity = RecomputeOptions::Granularity::full};
  LayoutCase sharded = toy_case();
  sharded.layout.world_size = 4;
  sharded.layout.expert_parallel = 4;
  sharded.sharding = StateSharding::parameters;
  for (const LayoutCase& c : {sliced, pipeline, sharded}) {
    SCOPED_TRACE(c.layout.world_size / c.layout.tensor_parallel);
    expect_same_outcome(run_one_rank(c), run_layout(c));
  }
}

TEST(ToyBlocks, CountAndLimitsFollowFromWhatTheyDeclare) {
  const ModelConfig config = toy_case().model;
  const Model model(config, with_toys());
  const int64_t plain_layers = Model(moe_model(2)).parameter_count();
  const int64_t hidden = config.hidden_size;
  const int64_t toy_layer = hidden * (4 * 16 + 2 * 12 + 1 + 2);  // and two norms
  EXPECT_EQ(model.parameter_count(), plain_layers + 2 * toy_layer);
  EXPECT_DOUBLE_EQ(model.layer_flops(0, 10), 2.0 * 16 * (4.0 * static_cast<double>(hidden) + 10) +
                                                 4.0 * 12 * static_cast<double>(hidden));
  LayoutOptions options;
  options.world_size = 8;
  options.tensor_parallel = 8;
  EXPECT_TRUE(model.layer(0).mixer->check_layout(Layout(options), ContextExchange::p2p));
}

}  // namespace
}  // namespace troupe::testing
