// Weights that are kept as master weights alone, of which ranks gather codes: the numbers are those
// of one rank, or of ranks that have the whole masters; and nothing else of the weights is stored.
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "ops/exchange/gather_parameter/gather_parameter.h"
#include "passes/precision.h"
#include "support/coded_weights.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// All state is sharded: also in f64, which needs no masters, codes are gathered.
std::vector<LayoutCase> sharded_cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t ranks,
                       const std::vector<Fp8Recipe>& recipes, const auto& configure) {
    for (const Fp8Recipe recipe : recipes) {
      LayoutCase c = coded_weights(name, recipe, ranks);
      c.sharding = StateSharding::parameters;
      configure(c);
      all.push_back(c);
    }
  };
  add("dp2", 2, {std::begin(kRecipes), std::end(kRecipes)},
      [](LayoutCase& c) { c.early_collectives = true; });
  // Shards begin within experts, and within blocks: those weights are gathered as they are.
  add("dp3", 3, {Fp8Recipe::tensorwise, Fp8Recipe::blockwise}, [](LayoutCase&) {});
  add("dp2_recompute", 2, {Fp8Recipe::tensorwise, Fp8Recipe::mxfp8}, [](LayoutCase& c) {
    c.early_collectives = true;
    c.recompute = {.granularity = RecomputeOptions::Granularity::full};
  });
  add("dp4_2_instances", 4, {Fp8Recipe::tensorwise},
      [](LayoutCase& c) { c.layout.optimizer_instances = 2; });
  add("pp2_dp2", 4, {Fp8Recipe::delayed}, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.early_collectives = true;
  });
  return all;
}

class ShardedWeightCodes : public ::testing::TestWithParam<LayoutCase> {};

// As precision_test.cc says of them.
Outcome without_zero_counts(Outcome outcome, Fp8Recipe recipe) {
  std::erase_if(outcome, [&](const auto& entry) {
    return recipe == Fp8Recipe::delayed && entry.first.ends_with("zero gradients");
  });
  return outcome;
}

TEST_P(ShardedWeightCodes, AgreeWithOneRank) {
  const Fp8Recipe recipe = GetParam().precision.recipe;
  expect_same_outcome(without_zero_counts(run_one_rank(GetParam()), recipe),
                      without_zero_counts(run_layout(GetParam()), recipe));
}

INSTANTIATE_TEST_SUITE_P(Layouts, ShardedWeightCodes, ::testing::ValuesIn(sharded_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(WeightCodes, ShardsOfMastersGiveTheBitsOfWholeOnes) {
  for (const Fp8Recipe recipe : kRecipes) {
    SCOPED_TRACE(recipe_name(recipe));
    LayoutCase whole = coded_weights("dp2", recipe, 2);
    whole.dtype = DType::bf16;
    whole.precision.counts_codes = false;
    const Outcome expected = run_layout(whole);
    for (const StateSharding sharding : {StateSharding::optimizer, StateSharding::parameters}) {
      LayoutCase shards = whole;
      shards.sharding = sharding;
      shards.early_collectives = true;
      expect_same_codes(expected, run_layout(shards), sharding);
    }
  }
}

// What a rank stores of the weights that products in 8 bits read.
TEST(WeightCodes, AreKeptAsMastersAlone) {
  for (const StateSharding sharding :
       {StateSharding::none, StateSharding::optimizer, StateSharding::parameters}) {
    LayoutCase c = coded_weights("dp2", Fp8Recipe::delayed, 2);
    c.dtype = DType::bf16;
    c.sharding = sharding;
    c.weight_codes->kept.assign(2, {});
    c.weight_codes->kept[1].fill(true);
    c.precision.kept = c.weight_codes->kept;
    const ModelState state = declare_model_state(c.model, c.dtype, /*trained=*/true,
                                                 {.run = run_layout_of(c), .rank = 1});
    std::set<std::string> unstored;
    for (const Parameter& parameter : state.parameters) {
      if ((*state.table)[parameter.value].is_stored) continue;
      unstored.insert(parameter.full_name());
      EXPECT_EQ((*state.table)[parameter.value].bytes(), 0U);
      EXPECT_EQ((*state.table)[parameter.master].dtype, DType::f32);
    }
    EXPECT_EQ(unstored,
              (std::set<std::string>{"layers.0.w_qkv", "layers.0.w_attention_out",
                                     "layers.0.w_gate_up", "layers.0.w_down",
                                     "layers.0.w_shared_gate_up", "layers.0.w_shared_down"}));
  }
}

// How many bytes a step gathers of parameters, by dtype.
std::map<DType, int64_t> gathered_bytes(const LayoutCase& layout) {
  const std::unique_ptr<const Program> program = program_of(layout, 0);
  std::map<DType, int64_t> bytes;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    const Op& op = program->op(index);
    if (op.spec != &kGatherParameter) continue;
    const Value& whole = program->value(program->outputs(op)[0]);
    bytes[whole.dtype] += static_cast<int64_t>(whole.bytes());
  }
  return bytes;
}

// A byte for each number instead of two, in each gathering: once for the step with a sharded
// optimizer, and for each micro-batch forward and backward with sharded parameters.
TEST(WeightCodes, TravelAsCodes) {
  LayoutCase c = coded_weights("dp2", Fp8Recipe::delayed, 2);
  c.dtype = DType::bf16;
  int64_t elements = 0;
  const ModelState state = declare_model_state(c.model, c.dtype, /*trained=*/true);
  for (const Parameter& parameter : state.parameters) {
    if (parameter.products) elements += parameter.whole_shape.elements();
  }
  c.sharding = StateSharding::optimizer;
  EXPECT_EQ(gathered_bytes(c), (std::map<DType, int64_t>{{DType::f8e4m3, elements}}));
  c.sharding = StateSharding::parameters;
  const std::map<DType, int64_t> codes = gathered_bytes(c);
  EXPECT_EQ(codes.at(DType::f8e4m3), 4 * elements);
  c.weight_codes.reset();
  const std::map<DType, int64_t> plain = gathered_bytes(c);
  EXPECT_EQ(plain.at(DType::bf16) - codes.at(DType::bf16), 2 * codes.at(DType::f8e4m3));
}

}  // namespace
}  // namespace troupe::testing
