// The declared state of a model: which tensors there are, of which types, and how they start.
#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "program/test_models.h"
#include "support/adamw_state.h"
#include "support/named_parameter.h"

namespace troupe {
namespace {

using namespace testing;

Shape shape_of(const ModelState& state, std::string_view name, int32_t layer = -1) {
  const Parameter* parameter = search_parameter(state, name, layer);
  return parameter == nullptr ? Shape{0} : (*state.table)[parameter->value].shape;
}

TEST(ModelState, ShapesOfAMixedModel) {
  ModelConfig config = moe_model(2);
  config.qk_layernorm = true;
  config.moe_layers = {false, true};
  config.ffn_hidden_size = 40;
  const ModelState state = declare_model_state(config, DType::f32, /*trained=*/true);
  EXPECT_EQ(shape_of(state, "embedding"), (Shape{96, 32}));
  EXPECT_EQ(shape_of(state, "head"), (Shape{96, 32}));
  EXPECT_EQ(shape_of(state, "final_norm"), (Shape{32}));
  for (const int32_t layer : {0, 1}) {
    EXPECT_EQ(shape_of(state, "input_norm", layer), (Shape{32}));
    EXPECT_EQ(shape_of(state, "w_qkv", layer), (Shape{(4 + 2 * 2) * 8, 32}));
    EXPECT_EQ(shape_of(state, "q_norm", layer), (Shape{8}));
    EXPECT_EQ(shape_of(state, "k_norm", layer), (Shape{8}));
    EXPECT_EQ(shape_of(state, "w_attention_out", layer), (Shape{32, 32}));
    EXPECT_EQ(shape_of(state, "post_attention_norm", layer), (Shape{32}));
  }
  EXPECT_EQ(search_parameter(state, "w_router", 0), nullptr);
  EXPECT_EQ(shape_of(state, "w_gate_up", 0), (Shape{80, 32}));
  EXPECT_EQ(shape_of(state, "w_down", 0), (Shape{32, 40}));
  EXPECT_EQ(shape_of(state, "w_router", 1), (Shape{4, 32}));
  EXPECT_EQ(shape_of(state, "w_gate_up", 1), (Shape{4, 48, 32}));
  EXPECT_EQ(shape_of(state, "w_down", 1), (Shape{4, 32, 24}));
}

TEST(ModelState, OptionalParameters) {
  const ModelState tied = declare_model_state(dense_model(1), DType::f32, false);
  EXPECT_EQ(search_parameter(tied, "head"), nullptr);
  const ModelState plain = declare_model_state(moe_model(1), DType::f32, false);
  EXPECT_EQ(search_parameter(plain, "q_norm", 0), nullptr);
  EXPECT_NE(search_parameter(plain, "head"), nullptr);
}

TEST(ModelState, TypesAndRoles) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const ModelState state = declare_model_state(moe_model(1), dtype, /*trained=*/true);
    std::set<int32_t> tensors;
    std::set<std::string> names;
    for (size_t i = 0; i < state.parameters.size(); ++i) {
      const Parameter& parameter = state.parameters[i];
      EXPECT_EQ(parameter.number(), i);
      const StateTensor& value = (*state.table)[parameter.value];
      // Weights of norms lie near 1, where bf16 is coarse.
      const bool norm = value.name.find("norm") != std::string::npos;
      EXPECT_EQ(value.dtype, norm ? accumulation_dtype(dtype) : dtype) << value.name;
      EXPECT_EQ(value.role, Role::parameter);
      EXPECT_EQ(value.gradient, parameter.gradient);
      EXPECT_EQ(parameter.master.valid(), value.dtype == DType::bf16) << value.name;
      for (const StateId id : {parameter.gradient, exp_avg_of(parameter).values,
                               exp_avg_sq_of(parameter).values, parameter.master}) {
        if (!id.valid()) continue;
        const StateTensor& tensor = (*state.table)[id];
        EXPECT_EQ(tensor.dtype, accumulation_dtype(dtype)) << tensor.name;
        EXPECT_EQ(tensor.shape, value.shape) << tensor.name;
        EXPECT_EQ(tensor.role, id == parameter.gradient ? Role::gradient : Role::optimizer);
        tensors.insert(id.index);
        names.insert(tensor.name);
      }
      tensors.insert(parameter.value.index);
      names.insert(value.name);
    }
    EXPECT_EQ(tensors.size(), static_cast<size_t>(state.table->size())) << "each is used once";
    EXPECT_EQ(names.size(), tensors.size()) << "checkpoints tell tensors apart by name";
  }
}

TEST(ModelState, WithoutTrainingThereAreOnlyWeights) {
  const ModelState state = declare_model_state(moe_model(1), DType::bf16, /*trained=*/false);
  EXPECT_EQ(static_cast<size_t>(state.table->size()), state.parameters.size());
  for (const Parameter& parameter : state.parameters) {
    EXPECT_FALSE(parameter.gradient.valid() || exp_avg_of(parameter).values.valid() ||
                 exp_avg_sq_of(parameter).values.valid() || parameter.master.valid());
  }
}

// Of a rank's first parameters, until what it updates of them is the share that was asked for.
TEST(ModelState, AShareOfTheOptimizerWaitsOnTheHost) {
  const ModelConfig config = moe_model(2);
  RunLayout run = layout_of_one_rank(2, 0);
  run.layout = Layout({.world_size = 2, .expert_parallel = 2});  // experts are whole
  run.sharding = StateSharding::optimizer;
  const auto state_of = [&](int32_t rank, double share) {
    run.optimizer_offload = share;
    return declare_model_state(config, DType::bf16, /*trained=*/true,
                               {.run = std::make_shared<const RunLayout>(run), .rank = rank});
  };
  for (const int32_t rank : {0, 1}) {
    const ModelState plain = state_of(rank, 0);
    std::vector<int64_t> sizes;
    for (const Parameter& parameter : plain.parameters) {
      sizes.push_back(parameter.shard.end - parameter.shard.begin);
    }
    const auto all = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
    // Half an element more than the first three have takes the fourth, half an element less does
    // not.
    const auto three = static_cast<double>(sizes[0] + sizes[1] + sizes[2]);
    for (const auto& [wanted, count] : {std::pair{three + 0.5, 4U}, std::pair{three - 0.5, 3U}}) {
      const ModelState state = state_of(rank, wanted / all);
      for (size_t i = 0; i < state.parameters.size(); ++i) {
        const Parameter& parameter = state.parameters[i];
        EXPECT_EQ((*state.table)[parameter.optimizer[0].values].on_host, i < count)
            << "rank " << rank << ", parameter " << i << " of " << count;
        EXPECT_FALSE((*state.table)[parameter.value].on_host);
      }
    }
  }
}

TEST(ModelState, NormsStartAtOneAndDoNotDecay) {
  const ModelState state = declare_model_state(dense_model(1), DType::f32, true);
  int norms = 0;
  for (const Parameter& parameter : state.parameters) {
    const bool norm = (*state.table)[parameter.value].shape.rank() == 1;
    norms += norm;
    EXPECT_EQ(parameter.decay, !norm);
    if (norm) {
      EXPECT_EQ(initial_value(parameter, 1, 0), 1.0);
    }
  }
  EXPECT_EQ(norms, 5) << "two of the layer, queries, keys, final";
}

TEST(ModelState, GainsOfZeroCentredNormsStartAtZero) {
  ModelConfig config = dense_model(1);
  config.zero_centered_gamma = true;
  const ModelState state = declare_model_state(config, DType::f32, true);
  for (const Parameter& parameter : state.parameters) {
    if ((*state.table)[parameter.value].shape.rank() > 1) continue;
    EXPECT_EQ(initial_value(parameter, 1, 0), 0.0) << parameter.name;
  }
}

std::vector<double> values(const Parameter& parameter, uint64_t seed, int64_t count) {
  std::vector<double> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(initial_value(parameter, seed, i));
  return all;
}

double deviation(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares / static_cast<double>(values.size()));
}

// The standard deviation of 20000 draws is known to 0.5 % (one in sqrt(2 n)): 2.5 % are five times
// that.
TEST(InitialValues, HaveTheirDeviation) {
  ModelConfig config = moe_model(8);
  config.init_method_std = 0.05;
  const ModelState state = declare_model_state(config, DType::f32, false);
  for (const Parameter& parameter : state.parameters) {
    if (parameter.layer > 1 || parameter.init_std == 0) continue;
    // Projections into the residual stream: 1 / sqrt(2 layers) of the others.
    const bool output = parameter.name == "w_attention_out" || parameter.name == "w_down";
    const double expected = output ? 0.05 / 4 : 0.05;
    EXPECT_NEAR(deviation(values(parameter, 7, 20000)), expected, 0.025 * expected)
        << (*state.table)[parameter.value].name;
  }
}

// As in Megatron, where the router draws its bias as it does its weights.
TEST(InitialValues, OfARoutersBiasAreDrawn) {
  ModelConfig config = moe_model(1);
  config.add_bias_linear = true;
  const ModelState state = declare_model_state(config, DType::f32, false);
  const Parameter& router = get_parameter(state, "b_router", 0);
  EXPECT_FALSE(router.decay);
  EXPECT_NEAR(deviation(values(router, 7, 20000)), config.init_method_std,
              0.025 * config.init_method_std);
  EXPECT_EQ(initial_value(get_parameter(state, "b_down", 0), 7, 0), 0.0);
}

TEST(InitialValues, OfAnEmbeddingMayHaveTheirOwnDeviation) {
  ModelConfig config = moe_model(1);
  config.embedding_init_method_std = 1.0;
  const ModelState state = declare_model_state(config, DType::f32, false);
  EXPECT_EQ(get_parameter(state, "embedding").init_std, 1.0);
  EXPECT_EQ(get_parameter(state, "head").init_std, config.init_method_std);
}

// Uniform: the bound is sqrt(6 / (rows + columns)), of one expert's matrix, and the deviation the
// bound over sqrt(3).
TEST(InitialValues, ByXaviersRule) {
  ModelConfig config = moe_model(1);
  config.init_method_xavier_uniform = true;
  const ModelState state = declare_model_state(config, DType::f32, false);
  const auto expect_bound = [&](std::string_view kind, int32_t layer, double rows, double columns) {
    const Parameter& parameter = get_parameter(state, kind, layer);
    const double bound = std::sqrt(6.0 / (rows + columns));
    const std::vector<double> drawn = values(parameter, 7, 20000);
    const auto [least, most] = std::minmax_element(drawn.begin(), drawn.end());
    EXPECT_GE(*least, -bound);
    EXPECT_LT(*most, bound);
    // Of 20000 draws one lies within 0.1 % of either end, except in one of e^10 cases.
    EXPECT_LT(*least, -0.998 * bound);
    EXPECT_GT(*most, 0.998 * bound);
    EXPECT_NEAR(deviation(drawn), bound / std::sqrt(3.0), 0.025 * bound);
  };
  const double hidden = config.hidden_size;
  expect_bound("embedding", -1, config.vocab_size, hidden);
  expect_bound("w_router", 0, config.num_experts, hidden);
  expect_bound("w_gate_up", 0, 2.0 * config.moe_ffn_hidden_size, hidden);
  expect_bound("w_down", 0, hidden, config.moe_ffn_hidden_size);
  EXPECT_EQ(initial_value(get_parameter(state, "final_norm"), 7, 0), 1.0);
  std::vector<double> bulk(50);
  fill_initial_values(get_parameter(state, "head"), 7, 9, 50, bulk.data());
  for (int64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(bulk[static_cast<size_t>(i)], initial_value(get_parameter(state, "head"), 7, 9 + i));
  }
}

TEST(InitialValues, DependOnSeedParameterAndElementAlone) {
  const ModelState state = declare_model_state(moe_model(2), DType::f32, false);
  const Parameter& a = state.parameters[0];
  EXPECT_NE(values(a, 1, 8), values(a, 2, 8));
  std::vector<double> normalised;
  for (const Parameter& parameter : state.parameters) {
    if (parameter.init_std == 0) continue;
    normalised.push_back(initial_value(parameter, 1, 0) / parameter.init_std);
  }
  std::sort(normalised.begin(), normalised.end());
  EXPECT_EQ(std::unique(normalised.begin(), normalised.end()), normalised.end())
      << "two parameters share their numbers";
}

// The order in which values are asked for, the other tensors of the table (a trained model has four
// times as many), and the dtype do not matter.
TEST(InitialValues, DoNotDependOnTheTable) {
  const ModelState plain = declare_model_state(moe_model(2), DType::f32, false);
  const ModelState trained = declare_model_state(moe_model(2), DType::bf16, true);
  ASSERT_EQ(plain.parameters.size(), trained.parameters.size());
  std::vector<std::vector<double>> forwards;
  for (const Parameter& parameter : plain.parameters) forwards.push_back(values(parameter, 3, 5));
  for (size_t i = trained.parameters.size(); i-- > 0;) {
    const Parameter& parameter = trained.parameters[i];
    for (int64_t element = 5; element-- > 0;) {
      EXPECT_EQ(initial_value(parameter, 3, element), forwards[i][static_cast<size_t>(element)]);
    }
  }
}

// Blocks of elements, of drawn and of constant parameters.
TEST(InitialValues, FilledInBulkAreTheSame) {
  const ModelState state = declare_model_state(moe_model(1), DType::f32, false);
  for (const Parameter& parameter : state.parameters) {
    std::vector<double> filled(100);
    fill_initial_values(parameter, 5, 77, 100, filled.data());
    for (int64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(filled[static_cast<size_t>(i)], initial_value(parameter, 5, 77 + i));
    }
  }
}

// A value that is written down: seeds must mean the same in every version.
TEST(InitialValues, AreTheSameInEveryVersion) {
  const ModelState state = declare_model_state(moe_model(2), DType::f32, false);
  const double first = initial_value(state.parameters[0], 1234, 0);
  const double later = initial_value(state.parameters[2], 1234, 1000);
  EXPECT_NEAR(first / 0.02, -1.6725620585825192, 1e-12);
  EXPECT_NEAR(later / 0.02, 0.6117908091463563, 1e-12);
}

}  // namespace
}  // namespace troupe
