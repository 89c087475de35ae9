// Tensor parallelism, with and without sequence parallelism, computes what one rank computes.
#include <gtest/gtest.h>

#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

std::vector<NamedModel> dense_models() {
  ModelConfig tied = dense_model(2);  // tied embeddings, norms of queries and keys by head
  ModelConfig biased = tied;
  biased.tie_embeddings = false;
  biased.normalization = Normalization::layer_norm;
  biased.add_bias_linear = true;
  biased.add_qkv_bias = true;
  biased.vocab_size = 97;
  biased.gated_linear_unit = false;
  biased.activation = ActivationFunction::gelu;
  biased.padding_token = 50;
  ModelConfig l2_norm = tied;
  l2_norm.qk_layernorm = false;
  l2_norm.qk_l2_norm = true;
  ModelConfig sinks = tied;  // one of each query head, however few groups there are
  sinks.attention_sinks = true;
  return {{"tied", tied}, {"biased", biased}, {"l2_norm", l2_norm}, {"sinks", sinks}};
}

std::vector<NamedModel> moe_models() {
  std::vector<NamedModel> models = auxiliary_loss_models(moe_model(2));
  ModelConfig biased = moe_model(2);  // the router and the experts, too
  biased.add_bias_linear = true;
  models.push_back({"biased_experts", biased});
  return models;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const NamedModel& model, int32_t tp, int32_t dp, bool sequence_parallel) {
    for (const int32_t micro_batch_size : {1, 2}) {
      LayoutCase each;
      each.name = model.name + "_tp" + std::to_string(tp) + "_dp" + std::to_string(dp) +
                  (sequence_parallel ? "_sp" : "") + "_mbs" + std::to_string(micro_batch_size);
      each.model = model.config;
      each.layout.world_size = tp * dp;
      each.layout.tensor_parallel = tp;
      each.layout.expert_tensor_parallel = 1;
      each.layout.sequence_parallel = sequence_parallel;
      each.micro_batch_size = micro_batch_size;
      each.micro_batches = 2;
      all.push_back(each);
    }
  };
  for (const NamedModel& model : dense_models()) {
    for (const bool sequence_parallel : {false, true}) {
      add(model, 2, 1, sequence_parallel);
      add(model, 4, 1, sequence_parallel);  // more ranks than key and value heads
      add(model, 2, 2, sequence_parallel);
    }
  }
  for (const NamedModel& model : moe_models()) {
    add(model, 2, 1, true);
    add(model, 4, 1, true);
    add(model, 2, 2, true);
  }
  return all;
}

class TensorParallelLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(TensorParallelLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
