#include "support/coded_weights.h"

#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <vector>

#include "support/layout_models.h"

namespace troupe::testing {
namespace {

double mean_distance(const std::vector<double>& one, const std::vector<double>& other) {
  double sum = 0;
  for (size_t i = 0; i < one.size(); ++i) sum += std::abs(one[i] - other.at(i));
  return sum / static_cast<double>(one.size());
}

}  // namespace

std::string recipe_name(Fp8Recipe recipe) {
  const std::map<Fp8Recipe, std::string> names = {{Fp8Recipe::tensorwise, "tensorwise"},
                                                  {Fp8Recipe::delayed, "delayed"},
                                                  {Fp8Recipe::blockwise, "blockwise"},
                                                  {Fp8Recipe::mxfp8, "mxfp8"}};
  return names.at(recipe);
}

LayoutCase coded_weights(const std::string& name, Fp8Recipe recipe, int32_t ranks) {
  const bool has_blocks = recipe == Fp8Recipe::blockwise || recipe == Fp8Recipe::mxfp8;
  LayoutCase c;
  c.name = name + "_" + recipe_name(recipe);
  c.model = auxiliary_loss_models(moe_model(2))[0].config;
  c.model.hidden_size = 256;
  c.model.num_attention_heads = 4;
  c.model.num_query_groups = 4;
  c.model.kv_channels = 64;
  c.model.moe_ffn_hidden_size = 128;
  c.model.moe_shared_expert_intermediate_size = 128;
  c.layout.world_size = ranks;
  c.layout.expert_tensor_parallel = 1;
  c.micro_batches = 2;
  c.sequence = 8;
  c.precision.recipe = recipe;
  if (!has_blocks) c.precision.format = Fp8Format::hybrid;
  c.precision.counts_codes = recipe == Fp8Recipe::tensorwise;
  if (recipe == Fp8Recipe::delayed) c.amax_history = 2;
  c.weight_codes = WeightCodes{.kept = {}, .has_blocks = has_blocks};
  return c;
}

void expect_same_codes(const Outcome& whole, const Outcome& shards, StateSharding sharding) {
  Outcome first_of_whole;
  Outcome first_of_shards;
  int masters = 0;
  for (const auto& [name, values] : whole) {
    const auto found = shards.find(name);
    ASSERT_NE(found, shards.end()) << name;
    const bool is_sum =
        name.find("norm") != std::string::npos ||
        name.find("zero gradients") != std::string::npos ||
        (sharding == StateSharding::parameters && name.find("gradient") != std::string::npos);
    if (name.starts_with("step 1") && !is_sum) {
      first_of_whole[name] = values;
      first_of_shards[name] = found->second;
    }
    if (!name.starts_with("master")) continue;
    ++masters;
    EXPECT_LT(mean_distance(values, found->second), 1e-4) << name;
  }
  EXPECT_EQ(masters, 12);
  EXPECT_GT(first_of_whole.size(), 5U);
  expect_same_bits(first_of_whole, first_of_shards);
}

}  // namespace troupe::testing
