// Products in 8 bits: in every layout that cuts no block the numbers are those of one rank; what is
// computed again has the same bits; and the pass puts quantised products where others were, of the
// same values, and nowhere else.
#include "passes/precision.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "model/parameters.h"
#include "ops/precision/code_counts/code_counts.h"
#include "ops/precision/quantize/quantize.h"
#include "ops/precision/quantize_activation/quantize_activation.h"
#include "program/op_spec.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

using Recipe = Fp8Recipe;
using Format = Fp8Format;

const PrecisionOptions kTensorwise{.recipe = Recipe::tensorwise, .format = Format::hybrid};
const PrecisionOptions kDelayed{
    .recipe = Recipe::delayed, .format = Format::hybrid, .delayed = {.amax = AmaxChoice::max}};
const PrecisionOptions kBlockwise{.recipe = Recipe::blockwise};
const PrecisionOptions kMxfp8{.recipe = Recipe::mxfp8};
const PrecisionOptions kNvfp4{.recipe = Recipe::nvfp4};

// All that tensor parallelism cuts in two is cut at a multiple of 128.
ModelConfig wide_model() {
  ModelConfig model = auxiliary_loss_models(moe_model(2))[0].config;
  model.hidden_size = 256;
  model.num_attention_heads = 4;
  model.num_query_groups = 4;
  model.kv_channels = 64;
  model.moe_ffn_hidden_size = 256;
  model.moe_shared_expert_intermediate_size = 256;
  return model;
}

std::vector<LayoutCase> precision_cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t ranks,
                       const std::map<std::string, PrecisionOptions>& recipes,
                       const auto& configure) {
    for (const auto& [recipe, precision] : recipes) {
      LayoutCase c;
      c.name = name + "_" + recipe;
      c.model = wide_model();
      c.layout.world_size = ranks;
      c.layout.expert_tensor_parallel = 1;
      c.micro_batches = 2;
      c.sequence = 16;
      c.precision = precision;
      c.precision.counts_codes = precision.recipe != Recipe::nvfp4;
      if (precision.recipe == Recipe::delayed) c.amax_history = 2;
      configure(c);
      all.push_back(c);
    }
  };
  const std::map<std::string, PrecisionOptions> every = {{"tensorwise", kTensorwise},
                                                         {"delayed", kDelayed},
                                                         {"blockwise", kBlockwise},
                                                         {"mxfp8", kMxfp8},
                                                         {"nvfp4", kNvfp4}};
  const std::map<std::string, PrecisionOptions> whole = {{"tensorwise", kTensorwise},
                                                         {"delayed", kDelayed}};
  const std::map<std::string, PrecisionOptions> delayed = {{"delayed", kDelayed}};
  add("dp2_zero1", 2, every, [](LayoutCase& c) {
    c.sharding = StateSharding::optimizer;
    c.early_collectives = true;
  });
  add("dp2_fsdp", 2, every, [](LayoutCase& c) {
    c.sharding = StateSharding::parameters;
    c.early_collectives = true;
  });
  add("pp2", 2, every, [](LayoutCase& c) { c.layout.pipeline_parallel = 2; });
  add("tp2_etp2", 2, every, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
    c.layout.expert_tensor_parallel = 2;
  });
  // Both ranks' tokens come to the rank of their expert, in their order.
  add("tp2_ep2", 2, every, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
  });
  // Here ranks have some of an expert's rows each.
  add("tp2_experts_twice", 2, whole, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
  });
  add("cp2", 2, whole, [](LayoutCase& c) { c.layout.context_parallel = 2; });
  // What came together has no scale of its own.
  add("ep2_of_dp2", 2, delayed, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
  });
  add("tp2_ep2_edp2", 4, delayed, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
    c.layout.expert_parallel = 2;
    c.dispatcher = TokenDispatcher::alltoall;
    c.sharding = StateSharding::optimizer;
  });
  add("pp2_zero_bubble", 2, delayed, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.chunks = 1;
    c.micro_batches = 3;
    c.schedule = PipelineSchedule::zb_h1;
  });
  add("pp2_merged", 2, delayed, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.micro_batches = 4;
    c.merged = true;
  });
  // Four chunks of 128 tokens, of which each rank has two.
  add("cp2_dense", 2, every, [](LayoutCase& c) {
    c.model = dense_model(2);
    c.model.hidden_size = 128;
    c.model.ffn_hidden_size = 128;
    c.layout.context_parallel = 2;
    c.layout.expert_tensor_parallel.reset();
    c.sequence = 512;
    c.micro_batches = 1;
  });
  return all;
}

class PrecisionLayouts : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(PrecisionLayouts, AgreeWithOneRank) {
  Outcome one = run_one_rank(GetParam());
  Outcome ranks = run_layout(GetParam());
  // Where all micro-batches have the same scales, gradients are sums of small integers times a
  // factor: many are 0, or what the rounding of the terms leaves, as the order of the sum has it.
  if (GetParam().precision.recipe == Recipe::delayed) {
    for (Outcome* outcome : {&one, &ranks}) {
      std::erase_if(*outcome,
                    [](const auto& entry) { return entry.first.ends_with("zero gradients"); });
    }
  }
  expect_same_outcome(one, ranks);
}

INSTANTIATE_TEST_SUITE_P(Layouts, PrecisionLayouts, ::testing::ValuesIn(precision_cases()),
                         [](const auto& info) { return info.param.name; });

// Recording and moving histories, and counting codes, wait for nothing but what they read and
// write.
TEST(Precision, HistoriesAndCountsAreTheSameInAnyOrderThatQueuesAllow) {
  LayoutCase c;
  c.model = wide_model();
  c.layout.world_size = 2;
  c.layout.tensor_parallel = 2;
  c.layout.sequence_parallel = true;
  c.layout.expert_parallel = 2;
  c.layout.expert_tensor_parallel = 1;
  c.dispatcher = TokenDispatcher::alltoall;
  c.micro_batches = 2;
  c.sequence = 16;
  c.precision = kDelayed;
  c.precision.counts_codes = true;
  c.amax_history = 2;
  const Outcome expected = run_layout(c);
  for (const uint32_t seed : {1U, 2U, 3U}) {
    expect_same_bits(expected, run_layout(c, {.interleaving = seed}));
  }
}

// A step in which the experts had too little room is void, and leaves the histories to the one that
// takes its place.
TEST(Precision, HistoriesMoveOnceWhereAStepRunsAgain) {
  LayoutCase c;
  c.model = wide_model();
  c.layout.world_size = 2;
  c.layout.expert_parallel = 2;
  c.dispatcher = TokenDispatcher::alltoall;
  c.sequence = 16;
  c.precision = kDelayed;
  c.amax_history = 4;
  const Outcome expected = run_layout(c);
  int64_t fallbacks = 0;
  c.expert_room = 0.5;
  c.fallbacks = &fallbacks;
  const Outcome found = run_layout(c);
  EXPECT_EQ(fallbacks, 3);
  int histories = 0;
  for (const auto& [name, values] : expected) {
    if (name.find("amax_history") == std::string::npos) continue;
    ++histories;
    for (size_t i = 0; i < values.size(); ++i) {
      // Rounds sum gradients of inputs in another order.
      EXPECT_NEAR(found.at(name)[i], values[i], 1e-6 * values[i]) << name << " element " << i;
    }
  }
  EXPECT_GT(histories, 0);
}

LayoutCase one_rank(const PrecisionOptions& precision) {
  LayoutCase c;
  c.model = wide_model();
  c.micro_batches = 2;
  c.sequence = 16;
  c.dtype = DType::bf16;
  c.precision = precision;
  if (precision.recipe == Recipe::delayed) c.amax_history = 2;
  return c;
}

TEST(Precision, RecomputeAndOffloadKeepTheBits) {
  for (PrecisionOptions precision : {kTensorwise, kDelayed, kBlockwise, kMxfp8, kNvfp4}) {
    precision.counts_codes = precision.recipe != Recipe::nvfp4;
    const LayoutCase plain = one_rank(precision);
    const Outcome expected = run_layout(plain);
    LayoutCase full = plain;
    full.recompute = {.granularity = RecomputeOptions::Granularity::full};
    expect_same_bits(expected, run_layout(full));
    LayoutCase modules = plain;
    modules.recompute = {
        .granularity = RecomputeOptions::Granularity::selective,
        .modules = {&kCoreAttentionModule, &kNormModule, &kExpertActivationModule, &kMoeModule}};
    modules.offload = {.modules = {&kQkvModule, &kExpertFc1Module}, .least_elements = 1};
    expect_same_bits(expected, run_layout(modules));
  }
}

// How many codes of a parameter's matrices are the largest, and how many 0, with a scale for each
// matrix by its own largest element.
std::array<double, 2> counts_of_weights(const Parameter& parameter) {
  const Shape& shape = parameter.whole_shape;
  const int64_t matrices = shape.rank() == 3 ? shape[0] : 1;
  const int64_t elements = shape.elements() / matrices;
  std::array<double, 2> counts = {};
  for (int64_t first = 0; first < shape.elements(); first += elements) {
    std::vector<float> values;
    float largest = 0;
    for (int64_t i = first; i < first + elements; ++i) {
      values.push_back(static_cast<float>(start_value(parameter, i)));
      largest = std::max(largest, std::fabs(values.back()));
    }
    for (const float value : values) {
      const float code = std::fabs(f8e4m3::nearest(value * (f8e4m3::kLargest / largest)));
      if (code == f8e4m3::kLargest) ++counts[0];
      if (code == 0) ++counts[1];
    }
  }
  return counts;
}

// Of each map's operands all elements of the step's micro-batches, once: also where they are
// computed again.
TEST(Precision, EveryCodeIsCountedOnce) {
  LayoutCase plain = one_rank(kTensorwise);
  plain.dtype = DType::f64;
  plain.precision.counts_codes = true;
  LayoutCase again = plain;
  again.recompute = {.granularity = RecomputeOptions::Granularity::full};
  const ModelState state = declare_model_state(plain.model, plain.dtype, /*trained=*/true);
  const double tokens = plain.micro_batches * plain.micro_batch_size * plain.sequence;
  for (LayoutCase* each : {&plain, &again}) {
    std::vector<std::array<std::vector<double>, kHistoryKinds>> counts;
    each->code_counts = &counts;
    run_layout(*each);
    ASSERT_EQ(counts.size(), 3U);
    std::set<std::string> maps;
    for (const Parameter& parameter : state.parameters) {
      const auto counts_of = [&](size_t step, size_t operand) {
        return counts[step][operand].data() + int64_t{parameter.number()} * kCountsOfCodes;
      };
      const std::string name = parameter.full_name();
      const double* const weight = counts_of(0, 1);
      if (weight[0] == 0) continue;
      maps.insert(parameter.name);
      const Shape& shape = parameter.whole_shape;
      const std::array<double, 2> expected = counts_of_weights(parameter);
      EXPECT_EQ(weight[0], static_cast<double>(shape.elements())) << name;
      EXPECT_EQ(weight[1], expected[0]) << name;
      EXPECT_EQ(weight[2], expected[1]) << name;
      const double rows = shape.rank() == 3 ? tokens * plain.model.moe_router_topk : tokens;
      for (const size_t step : {0, 2}) {
        EXPECT_EQ(counts_of(step, 0)[0], rows * static_cast<double>(shape.back())) << name;
        EXPECT_EQ(counts_of(step, 2)[0], rows * static_cast<double>(shape[shape.rank() - 2]))
            << name;
      }
    }
    EXPECT_EQ(maps, (std::set<std::string>{"w_qkv", "w_attention_out", "w_gate_up", "w_down",
                                           "w_shared_gate_up", "w_shared_down"}));
  }
}

// By the largest element of the step before, some elements are too large; room for 2^8 times as
// large ones is enough for all.
TEST(Precision, ScalesThatAreTooSmallSaturate) {
  std::vector<double> saturated;
  for (const int32_t margin : {0, 8}) {
    LayoutCase c = one_rank(kDelayed);
    c.precision.counts_codes = true;
    c.precision.delayed.margin = margin;
    std::vector<std::array<std::vector<double>, kHistoryKinds>> counts;
    c.code_counts = &counts;
    run_layout(c);
    double sum = 0;
    for (const std::vector<double>& operand : counts.at(1)) {
      for (size_t i = 1; i < operand.size(); i += kCountsOfCodes) sum += operand[i];
    }
    saturated.push_back(sum);
  }
  EXPECT_GT(saturated[0], 0);
  EXPECT_EQ(saturated[1], 0);
}

TEST(Precision, TheRecipesAreDifferentNumbers) {
  std::set<Outcome> outcomes;
  for (const PrecisionOptions& precision :
       {PrecisionOptions{}, kTensorwise, kDelayed, kBlockwise, kMxfp8, kNvfp4}) {
    outcomes.insert(run_layout(one_rank(precision)));
  }
  EXPECT_EQ(outcomes.size(), 6U);
}

struct Product {
  std::string kind;
  std::string result;
  std::array<std::string, 2> operands;
  int32_t layer;
  bool operator==(const Product&) const = default;
};

// The products of a program that may be lowered, with the values that they multiply: those that
// their codes are of. And how often each state is quantised.
struct Products {
  std::vector<Product> plain;
  std::vector<Product> quantized;
  std::map<int32_t, int> weights;  // by value
};

Products products_of(const LayoutCase& layout) {
  const std::unique_ptr<const Program> program = program_of(layout, 0);
  std::map<int32_t, std::string> source;  // of codes
  Products found;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    const Op& op = program->op(index);
    const auto inputs = program->inputs(op);
    const auto name = [&](ValueId id) { return program->value(id).name; };
    if (op.spec == &kQuantize || op.spec == &kQuantizeActivation ||
        op.spec == &kQuantizeActivationGradient) {
      const std::string codes = name(program->outputs(op)[0]);
      for (const ValueId output : program->outputs(op)) {
        source[output.index] = codes.substr(0, codes.rfind("_q"));
      }
      if (is_state(program->value(inputs[0]).role)) ++found.weights[inputs[0].index];
    }
    const std::string kind = op.spec->name;
    const bool is_quantized = kind.starts_with("quantized_");
    if (!is_quantized && op.spec->quantized == nullptr) continue;
    Product product{.kind = is_quantized ? kind.substr(10) : kind,
                    .result = name(program->outputs(op)[0]),
                    .operands = {},
                    .layer = op.place.layer};
    for (size_t i = 0; i < 2; ++i) {
      product.operands[i] = is_quantized ? source.at(inputs[i].index) : name(inputs[i]);
    }
    (is_quantized ? found.quantized : found.plain).push_back(product);
  }
  return found;
}

TEST(Precision, ProductsOfLayersAreReplacedByThoseOfTheSameValues) {
  const Products before = products_of(one_rank({}));
  const Products after = products_of(one_rank(kMxfp8));
  ASSERT_FALSE(after.quantized.empty());
  // Every product is there once more, quantised or not, and in the same order.
  std::vector<Product> expected;
  for (const Product& product : before.plain) {
    const auto& [one, other] = product.operands;
    const bool keeps = product.layer < 0 || other.ends_with("w_router") ||
                       other.ends_with("w_shared_gate") || one.starts_with("d_router_logits") ||
                       product.result.ends_with("w_shared_gate");
    if (!keeps) expected.push_back(product);
  }
  ASSERT_EQ(after.quantized.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(after.quantized[i].kind, expected[i].kind) << i;
    EXPECT_EQ(after.quantized[i].result, expected[i].result) << i;
    EXPECT_EQ(after.quantized[i].operands[0], expected[i].operands[0]) << expected[i].result;
    EXPECT_EQ(after.quantized[i].operands[1], expected[i].operands[1]) << expected[i].result;
  }
  EXPECT_EQ(after.plain.size() + after.quantized.size(), before.plain.size());
}

// In one operation for both directions, whether these share scales or not.
TEST(Precision, WeightsAreQuantizedOnceAStep) {
  for (const PrecisionOptions& precision : {kDelayed, kBlockwise, kMxfp8}) {
    const auto weights = products_of(one_rank(precision)).weights;
    EXPECT_FALSE(weights.empty());
    for (const auto& [weight, count] : weights) EXPECT_EQ(count, 1) << weight;
  }
}

// Where scales are known before or lie within few rows, and nothing else reads what is made.
TEST(Precision, ActivationsAreQuantizedAsTheyAreMade) {
  const auto counts_of = [](const PrecisionOptions& precision) {
    const std::unique_ptr<const Program> program = program_of(one_rank(precision), 0);
    std::array<int, 4> counts{};
    for (int32_t index = 0; index < program->op_count(); ++index) {
      const OpSpec* kind = program->op(index).spec;
      if (kind == &kActivation) ++counts[0];
      if (kind == &kActivationGradient) ++counts[1];
      if (kind == &kQuantizeActivation) ++counts[2];
      if (kind == &kQuantizeActivationGradient) ++counts[3];
    }
    return counts;
  };
  const std::array<int, 4> plain = counts_of({});
  ASSERT_GT(plain[0], 0);
  const std::array<int, 4> as_made = {0, 0, plain[0], plain[1]};
  EXPECT_EQ(counts_of(kDelayed), as_made);
  EXPECT_EQ(counts_of(kBlockwise), as_made);
  for (PrecisionOptions precision : {kTensorwise, kMxfp8, kNvfp4}) {
    EXPECT_EQ(counts_of(precision), plain);
  }
  for (PrecisionOptions precision : {kDelayed, kBlockwise}) {
    PrecisionOptions stores = precision;
    stores.stores_activation_inputs = true;
    EXPECT_EQ(counts_of(stores), plain);
    precision.weight_gradients = false;
    EXPECT_EQ(counts_of(precision), plain);
  }
}

TEST(Precision, GradientsOfWeightsMayKeepTheirs) {
  PrecisionOptions precision = kDelayed;
  const Products all = products_of(one_rank(precision));
  precision.weight_gradients = false;
  const Products others = products_of(one_rank(precision));
  EXPECT_FALSE(others.quantized.empty());
  std::vector<Product> expected;
  for (const Product& product : all.quantized) {
    if (!product.kind.ends_with("weight_gradient")) expected.push_back(product);
  }
  EXPECT_EQ(others.quantized, expected);
  EXPECT_EQ(others.plain.size() + others.quantized.size(), all.plain.size() + all.quantized.size());
}

// Forward and in both gradients.
TEST(Precision, ProductsOfModulesMayKeepTheirs) {
  const Products all = products_of(one_rank(kDelayed));
  const auto in_group = [](const Product& product, ProductGroup group) {
    const auto about = [&](const char* what) {
      return product.result.find(what) != std::string::npos ||
             product.operands[0].find(what) != std::string::npos ||
             product.operands[1].find(what) != std::string::npos;
    };
    if (group == ProductGroup::attention) return about("w_qkv") || about("w_attention_out");
    if (group == ProductGroup::shared_experts) return about("shared");
    return product.kind.starts_with("grouped");
  };
  for (const ProductGroup group :
       {ProductGroup::attention, ProductGroup::shared_experts, ProductGroup::experts}) {
    PrecisionOptions precision = kDelayed;
    precision.kept.resize(2);
    for (auto& kept : precision.kept) kept[static_cast<size_t>(group)] = true;
    std::vector<Product> expected;
    int64_t kept = 0;
    for (const Product& product : all.quantized) {
      if (in_group(product, group)) {
        ++kept;
      } else {
        expected.push_back(product);
      }
    }
    EXPECT_GT(kept, 0);
    EXPECT_EQ(products_of(one_rank(precision)).quantized, expected);
  }
}

TEST(Precision, LayersMayKeepTheirs) {
  PrecisionOptions precision = kBlockwise;
  precision.kept.resize(2);
  precision.kept[0].fill(true);
  for (const Product& product : products_of(one_rank(precision)).quantized) {
    EXPECT_EQ(product.layer, 1) << product.result;
  }
  precision.kept[0].fill(false);
  precision.kept[1].fill(true);
  const Products last = products_of(one_rank(precision));
  EXPECT_FALSE(last.quantized.empty());
  for (const Product& product : last.quantized) EXPECT_EQ(product.layer, 0) << product.result;
}

}  // namespace
}  // namespace troupe::testing
