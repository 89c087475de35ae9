// Slices of parameters: the ranges of a small model written out, and for many layouts that the
// slices of all ranks together are the whole parameter, each element as often as it must be.
#include "model/parameter_layout.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "model/rank_parameters.h"
#include "options/refusals.h"
#include "support/named_parameter.h"

namespace troupe {
namespace {

using Ranges = std::vector<IndexRange>;

ModelConfig small_moe() {
  ModelConfig config;
  config.vocab_size = 35;
  config.hidden_size = 16;
  config.num_layers = 4;
  config.num_attention_heads = 8;
  config.num_query_groups = 2;
  config.kv_channels = 4;
  config.qk_layernorm = true;
  config.add_qkv_bias = true;
  config.max_position_embeddings = 64;
  config.ffn_hidden_size = 32;
  config.num_experts = 8;
  config.moe_router_topk = 2;
  config.moe_ffn_hidden_size = 8;
  config.moe_layers = {false, true, true, true};
  config.moe_shared_expert_intermediate_size = 16;
  config.moe_shared_expert_gate = true;
  return config;
}

LayoutOptions sizes(int32_t world, int32_t tp, int32_t ep, int32_t etp, int32_t pp = 1) {
  LayoutOptions options;
  options.world_size = world;
  options.tensor_parallel = tp;
  options.expert_parallel = ep;
  options.expert_tensor_parallel = etp;
  options.pipeline_parallel = pp;
  options.sequence_parallel = true;
  return options;
}

ParameterSlice slice(const ModelConfig& config, const Layout& layout, int32_t rank,
                     std::string_view name, int32_t layer) {
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  return slice_of(get_parameter(state, name, layer), layout, rank);
}

// The table of docs/layouts.md: heads, gate and linear halves each by themselves, columns, blocks
// of the vocabulary.
TEST(ParameterLayout, SlicesOfTensorParallelWrittenOut) {
  const ModelConfig config = small_moe();
  const Layout layout(sizes(4, 4, 1, 1));
  const int32_t rank = 3;
  const auto rows = [&](std::string_view name, int32_t layer = 1) {
    return slice(config, layout, rank, name, layer).ranges[0];
  };
  // 8 query heads of 4: two each. 2 key heads for 4 ranks: ranks 2 and 3 hold the second one.
  EXPECT_EQ(rows("w_qkv"), (Ranges{{24, 32}, {36, 40}, {44, 48}}));
  EXPECT_EQ(rows("b_qkv"), (Ranges{{24, 32}, {36, 40}, {44, 48}}));
  EXPECT_EQ(rows("w_gate_up", 0), (Ranges{{24, 32}, {56, 64}}));
  EXPECT_EQ(rows("w_shared_gate_up"), (Ranges{{12, 16}, {28, 32}}));
  EXPECT_EQ(rows("embedding", -1), (Ranges{{26, 35}}));
  EXPECT_EQ(rows("head", -1), (Ranges{{26, 35}}));
  const ParameterSlice out = slice(config, layout, rank, "w_attention_out", 1);
  EXPECT_EQ(out.ranges, (std::vector<Ranges>{{{0, 16}}, {{24, 32}}}));
  const ParameterSlice down = slice(config, layout, rank, "w_down", 0);
  EXPECT_EQ(down.ranges, (std::vector<Ranges>{{{0, 16}}, {{24, 32}}}));
}

TEST(ParameterLayout, ExpertsAreCutByTheirOwnMesh) {
  const ModelConfig config = small_moe();
  const Layout layout(sizes(8, 2, 4, 2));
  const int32_t rank = 5;
  ASSERT_EQ(layout.expert_place(rank), (ExpertPlace{.etp = 1, .ep = 2, .edp = 0, .pp = 0}));
  const ParameterSlice first = slice(config, layout, rank, "w_gate_up", 2);
  EXPECT_EQ(first.ranges, (std::vector<Ranges>{{{4, 6}}, {{4, 8}, {12, 16}}, {{0, 16}}}));
  const ParameterSlice second = slice(config, layout, rank, "w_down", 2);
  EXPECT_EQ(second.ranges, (std::vector<Ranges>{{{4, 6}}, {{0, 16}}, {{4, 8}}}));
}

TEST(ParameterLayout, GradientClasses) {
  const ModelConfig config = small_moe();
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
  const auto class_of = [&](const char* name, int32_t layer = 1) {
    return get_parameter(state, name, layer).gradient_class;
  };
  EXPECT_EQ(class_of("w_router"), GradientClass::replicated);
  EXPECT_EQ(class_of("w_shared_gate"), GradientClass::replicated);
  EXPECT_EQ(class_of("input_norm"), GradientClass::replicated);
  EXPECT_EQ(class_of("q_norm"), GradientClass::head_norm);
  EXPECT_EQ(class_of("k_norm"), GradientClass::head_norm);
  EXPECT_EQ(class_of("w_qkv"), GradientClass::sliced);
  EXPECT_EQ(class_of("w_shared_gate_up"), GradientClass::sliced);
  EXPECT_EQ(class_of("w_gate_up", 0), GradientClass::sliced);
  EXPECT_EQ(class_of("w_gate_up"), GradientClass::expert);
  EXPECT_EQ(class_of("embedding", -1), GradientClass::embedding);
  EXPECT_EQ(class_of("head", -1), GradientClass::sliced);
}

// How often each element of one stage's parameters is held, over all ranks: sliced ones once per
// rank of DP x CP, replicated ones once per rank, experts once per rank of EDP, keys and values
// that are fewer than TP more often.
TEST(ParameterLayout, SlicesCoverEveryElementEquallyOften) {
  struct Case {
    int32_t world, tp, ep, etp, pp;
  };
  const Case cases[] = {{1, 1, 1, 1, 1}, {2, 2, 1, 1, 1},  {8, 2, 4, 1, 1}, {8, 4, 2, 4, 1},
                        {8, 1, 8, 1, 1}, {16, 8, 2, 4, 1}, {8, 2, 2, 1, 2}, {16, 2, 2, 2, 4}};
  for (const bool biased : {false, true}) {
    for (const Case& c : cases) {
      if (biased && c.etp > 1) continue;
      ModelConfig config = small_moe();
      config.add_bias_linear = biased;
      config.qk_norm_scope = biased ? QkNormScope::projection : QkNormScope::head;
      const Layout layout(sizes(c.world, c.tp, c.ep, c.etp, c.pp));
      SCOPED_TRACE("world " + std::to_string(c.world) + " tp " + std::to_string(c.tp) + " ep " +
                   std::to_string(c.ep) + " etp " + std::to_string(c.etp));
      ASSERT_FALSE(check_layout(config, layout, 64));
      const PipelinePartition partition =
          even_partition(config.num_layers, c.pp, 1, StagePlacement::loop).value();
      const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
      const int32_t stage_ranks = c.world / c.pp;
      for (const Parameter& parameter : state.parameters) {
        const StateTensor& tensor = (*state.table)[parameter.value];
        const Shape& shape = tensor.shape;
        const int64_t inner = shape.rank() > 1 ? shape[1] : 1;
        const int64_t innermost = shape.rank() > 2 ? shape[2] : 1;
        std::vector<int> times(static_cast<size_t>(shape.elements()));
        const GradientClass gradient = parameter.gradient_class;
        for (int32_t rank = 0; rank < c.world; ++rank) {
          const int32_t place = layout.dense_place(rank).pp;
          if (!holds(partition, place, parameter)) continue;
          const ParameterSlice own = slice_of(parameter, layout, rank);
          const Ranges one = {{0, 1}};
          const Ranges& second = shape.rank() > 1 ? own.ranges[1] : one;
          const Ranges& third = shape.rank() > 2 ? own.ranges[2] : one;
          int64_t elements = 0;
          for (const IndexRange& a : own.ranges[0]) {
            for (int64_t i = a.begin; i < a.end; ++i) {
              for (const IndexRange& b : second) {
                for (int64_t j = b.begin; j < b.end; ++j) {
                  for (const IndexRange& d : third) {
                    for (int64_t k = d.begin; k < d.end; ++k) {
                      ++times[static_cast<size_t>((i * inner + j) * innermost + k)];
                      ++elements;
                    }
                  }
                }
              }
            }
          }
          EXPECT_EQ(own.elements(), elements) << tensor.name;
        }
        const bool replicated =
            gradient == GradientClass::replicated || gradient == GradientClass::head_norm;
        const int expected = gradient == GradientClass::expert ? layout.edp()
                             : replicated                      ? stage_ranks
                                                               : layout.dp() * layout.cp();
        const bool has_keys =
            parameter.name == "w_qkv" || parameter.name == "b_qkv" || parameter.name == "k_norm";
        const int copies = std::max(1, c.tp / config.num_query_groups);
        const int64_t queries = parameter.name == "k_norm"
                                    ? 0
                                    : config.num_attention_heads * config.kv_channels * inner;
        for (int64_t i = 0; i < shape.elements(); ++i) {
          const bool key = has_keys && !replicated && i >= queries;
          ASSERT_EQ(times[static_cast<size_t>(i)], expected * (key ? copies : 1))
              << tensor.name << ", element " << i;
        }
      }
    }
  }
}

TEST(ParameterLayout, CountsOfAllStagesAddUp) {
  for (const bool tied : {false, true}) {
    ModelConfig config = small_moe();
    config.tie_embeddings = tied;
    const ModelState state = declare_model_state(config, DType::f32, /*trained=*/false);
    const Layout layout(sizes(4, 1, 1, 1, 4));
    const PipelinePartition partition =
        parse_partition("E|tt|t|tL", 4, 0, 4, StagePlacement::loop).value();
    RankParameters sum;
    for (int32_t rank = 0; rank < 4; ++rank) {
      const RankParameters count = count_parameters(state, layout, partition, rank);
      EXPECT_EQ(count.bytes, 4 * static_cast<uint64_t>(count.dense + count.expert));
      sum.dense += count.dense;
      sum.expert += count.expert;
    }
    const int64_t embedding = int64_t{config.vocab_size} * config.hidden_size;
    // Tied weights are on the first and on the last rank.
    EXPECT_EQ(sum.dense + sum.expert, Model(config).parameter_count() + (tied ? embedding : 0));
    // 3 layers of 8 experts of 3 products of 8 x 16.
    EXPECT_EQ(sum.expert, 3 * 8 * 3 * 8 * 16);
  }
}

void expect_refused(const ModelConfig& config, const LayoutOptions& options, int64_t sequence,
                    const std::vector<std::string>& phrases,
                    ContextExchange exchange = ContextExchange::p2p) {
  const std::optional<Refusal> refusal = check_layout(config, Layout(options), sequence, exchange);
  ASSERT_TRUE(refusal.has_value()) << "accepted, instead of: " << phrases.front();
  const std::string message = text_of(*refusal);
  for (const std::string& phrase : phrases) {
    EXPECT_NE(message.find(phrase), std::string::npos)
        << "'" << phrase << "' is not in: " << message;
  }
}

TEST(ParameterLayout, RefusalsNameTheRuleAndTheNearestSizes) {
  ModelConfig config = small_moe();
  expect_refused(
      config, sizes(3, 3, 1, 1), 64,
      {"--tensor-model-parallel-size 3", "8 query heads", "2 key-value heads", "Nearest: 2 or 4."});
  expect_refused(config, sizes(3, 1, 3, 1), 64,
                 {"--expert-model-parallel-size 3", "number of experts, 8", "Nearest: 2 or 4."});
  expect_refused(config, sizes(3, 1, 1, 3), 64,
                 {"--expert-tensor-parallel-size 3", "experts' inner size, 8"});
  ModelConfig dense = config;
  dense.num_experts = 0;
  expect_refused(dense, sizes(2, 1, 2, 1), 64,
                 {"--expert-model-parallel-size 2", "no experts. Leave it out."});
  EXPECT_EQ(check_layout(dense, Layout(sizes(2, 1, 2, 1)), 64)->nearest, std::vector<int64_t>{1});
  LayoutOptions context = sizes(4, 1, 1, 1);
  context.context_parallel = 4;
  ASSERT_FALSE(check_layout(config, Layout(context), 64));
  expect_refused(
      config, context, 64,
      {"--context-parallel-size 4", "--cp-comm-type a2a", "2 key-value heads", "Nearest: 2."},
      ContextExchange::a2a);
  config.linear_attention_layers.assign(4, true);
  config.linear_conv_kernel_dim = 4;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.linear_key_head_dim = 4;
  config.linear_value_head_dim = 4;
  EXPECT_FALSE(check_layout(config, Layout(context), 64)) << "states pass";
  expect_refused(config, sizes(4, 4, 1, 1), 64,
                 {"--tensor-model-parallel-size 4", "key heads of the model's gated delta nets"});
  config = small_moe();
  config.qk_layernorm = true;
  config.qk_norm_scope = QkNormScope::projection;
  expect_refused(
      config, sizes(4, 4, 1, 1), 64,
      {"--tensor-model-parallel-size 4", "norm of all keys", "2 key-value heads", "Nearest: 2."});
  config = small_moe();
  config.moe_shared_expert_intermediate_size = 12;
  expect_refused(config, sizes(8, 8, 1, 1), 64, {"shared expert's inner size, 12"});
  config = small_moe();
  config.add_bias_linear = true;
  expect_refused(config, sizes(2, 1, 1, 2), 64, {"experts with biases cannot be sliced"});
  config = small_moe();
  config.num_experts = 0;
  config.moe_layers.clear();
  config.moe_shared_expert_intermediate_size = 0;
  config.moe_shared_expert_gate = false;
  expect_refused(config, sizes(2, 1, 2, 1), 64, {"the model has no experts"});

  LayoutOptions contexts = sizes(8, 2, 1, 1);
  contexts.context_parallel = 4;
  expect_refused(small_moe(), contexts, 60,
                 {"--seq-length 60", "must be a multiple of 8", "Nearest: 56 or 64."});
  contexts = sizes(12, 4, 1, 1);
  contexts.context_parallel = 3;
  expect_refused(small_moe(), contexts, 6, {"multiple of 12", "Nearest: 12."});
}

// Sequences are cut into two chunks for each rank of CP, and what a rank of CP holds among those of
// TP where these share sequences: every length up to 60 by all sizes up to 4.
TEST(ParameterLayout, SequencesAreMultiplesOfWhatTheyAreCutInto) {
  for (const int32_t tp : {1, 2, 3, 4}) {
    for (const int32_t cp : {1, 2, 3, 4}) {
      for (const bool shares_sequences : {false, true}) {
        LayoutOptions options = sizes(tp * cp, tp, 1, 1);
        options.context_parallel = cp;
        options.sequence_parallel = shares_sequences;
        const Layout layout(options);
        ModelConfig config = small_moe();
        config.num_attention_heads = config.num_query_groups = 12;
        config.ffn_hidden_size = config.moe_shared_expert_intermediate_size = 24;
        const int64_t cut_by = shares_sequences ? tp : 1;
        const int64_t unit = std::lcm(cp > 1 ? 2 * cp : 1, cut_by * cp);
        for (int64_t sequence = 1; sequence <= 60; ++sequence) {
          SCOPED_TRACE("tp " + std::to_string(tp) + " cp " + std::to_string(cp) + " sequence " +
                       std::to_string(sequence));
          const std::optional<Refusal> refusal = check_layout(config, layout, sequence);
          ASSERT_EQ(refusal.has_value(), sequence % unit != 0);
          if (!refusal) continue;
          const int64_t below = sequence / unit * unit;
          const std::string nearest =
              (below > 0 ? std::to_string(below) + " or " : "") + std::to_string(below + unit);
          const std::string sharing =
              cut_by > 1 ? " and --sequence-parallel over " + std::to_string(tp) + " ranks" : "";
          EXPECT_EQ(text_of(*refusal), "--seq-length " + std::to_string(sequence) +
                                           ": with --context-parallel-size " + std::to_string(cp) +
                                           sharing + " it must be a multiple of " +
                                           std::to_string(unit) + ". Nearest: " + nearest + ".");
        }
      }
    }
  }
}

}  // namespace
}  // namespace troupe
