// Context parallelism, in all forms of attention, computes what one rank computes.
#include <gtest/gtest.h>

#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

// With as many key and value heads as query heads, so that a2a can cut them among four ranks.
ModelConfig four_groups(ModelConfig config) {
  config.num_query_groups = 4;
  return config;
}

NamedModel dense() {
  return {"dense", four_groups(dense_model(2))};
}

NamedModel grouped() {
  ModelConfig config = dense_model(2);
  config.tie_embeddings = false;
  config.normalization = Normalization::layer_norm;
  config.add_bias_linear = true;
  config.add_qkv_bias = true;
  config.vocab_size = 97;
  return {"grouped", config};
}

NamedModel window(int32_t size) {
  ModelConfig config = four_groups(dense_model(2));
  config.sliding_window = size;
  return {"window" + std::to_string(size), config};
}

std::vector<NamedModel> moe_models() {
  return auxiliary_loss_models(four_groups(moe_model(2)));
}

struct Ranks {
  int32_t cp = 2;
  int32_t tp = 1;
  int32_t dp = 1;
  int32_t ep = 1;
  int32_t etp = 1;
  int32_t pp = 1;
  bool sequence_parallel = false;
};

constexpr ContextExchange kExchanges[] = {ContextExchange::p2p, ContextExchange::a2a,
                                          ContextExchange::allgather};

LayoutCase layout_case(const NamedModel& model, const Ranks& ranks, ContextExchange exchange,
                       int32_t micro_batch_size) {
  LayoutCase each;
  each.name = model.name + "_" + std::string(name_of(exchange)) + "_cp" + std::to_string(ranks.cp);
  const auto name_size = [&](const char* dimension, int32_t size) {
    if (size > 1) each.name += std::string("_") + dimension + std::to_string(size);
  };
  name_size("tp", ranks.tp);
  name_size("dp", ranks.dp);
  name_size("ep", ranks.ep);
  name_size("etp", ranks.etp);
  name_size("pp", ranks.pp);
  if (ranks.sequence_parallel) each.name += "_sp";
  each.name += "_mbs" + std::to_string(micro_batch_size);
  each.model = model.config;
  each.layout.world_size = ranks.cp * ranks.tp * ranks.dp * ranks.pp;
  each.layout.pipeline_parallel = ranks.pp;
  each.layout.tensor_parallel = ranks.tp;
  each.layout.context_parallel = ranks.cp;
  each.layout.expert_parallel = ranks.ep;
  each.layout.expert_tensor_parallel = ranks.etp;
  each.layout.sequence_parallel = ranks.sequence_parallel;
  each.micro_batch_size = micro_batch_size;
  each.micro_batches = 2;
  each.sequence = 16;
  each.context_exchange = exchange;
  return each;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const NamedModel& model, const Ranks& ranks, int32_t micro_batch_size) {
    for (const ContextExchange exchange : kExchanges) {
      // a2a cuts the heads that TP leaves.
      const int32_t groups = std::max(1, model.config.num_query_groups / ranks.tp);
      if (exchange == ContextExchange::a2a && groups % ranks.cp != 0) continue;
      all.push_back(layout_case(model, ranks, exchange, micro_batch_size));
    }
  };
  add(dense(), {.cp = 2}, 1);
  add(dense(), {.cp = 4}, 2);
  add(dense(), {.cp = 2, .tp = 2}, 2);
  add(dense(), {.cp = 2, .tp = 2, .sequence_parallel = true}, 2);
  add(dense(), {.cp = 2, .dp = 2}, 1);
  add(grouped(), {.cp = 2}, 2);
  add(grouped(), {.cp = 4}, 1);
  add(grouped(), {.cp = 2, .tp = 4, .sequence_parallel = true}, 1);  // shared key and value heads
  for (const int32_t size : {2, 3, 7}) {
    add(window(size), {.cp = 2}, 2);
    add(window(size), {.cp = 4}, 1);
  }
  for (const NamedModel& model : moe_models()) {
    add(model, {.cp = 2}, 2);
    add(model, {.cp = 4}, 1);
    add(model, {.cp = 2, .tp = 2, .sequence_parallel = true}, 2);
    add(model, {.cp = 2, .dp = 2}, 1);
    // Experts over the ranks of cp, and of all dimensions.
    add(model, {.cp = 2, .ep = 2}, 2);
    add(model, {.cp = 2, .tp = 2, .ep = 4, .sequence_parallel = true}, 1);
    add(model, {.cp = 2, .tp = 2, .ep = 2, .etp = 2, .sequence_parallel = true}, 1);
    add(model, {.cp = 2, .dp = 2, .ep = 2}, 1);
  }
  const NamedModel delta_net = delta_net_model(moe_models().front().config);
  add(delta_net, {.cp = 2}, 2);
  add(delta_net, {.cp = 4}, 1);
  add(delta_net, {.cp = 2, .tp = 2, .sequence_parallel = true}, 2);
  add(delta_net, {.cp = 4, .tp = 2, .ep = 4, .sequence_parallel = true}, 1);
  add(delta_net, {.cp = 2, .ep = 2}, 2);
  add(delta_net, {.cp = 2, .pp = 2}, 2);
  // With key heads that the ranks of cp cannot share, states pass. Of four ranks a chunk is shorter
  // than what a convolution reads before it.
  const auto pass = [&](const NamedModel& model, const Ranks& ranks, int32_t micro_batch_size) {
    all.push_back(layout_case(model, ranks, ContextExchange::allgather, micro_batch_size));
  };
  const NamedModel odd = delta_net_model(moe_models().front().config, 3);
  pass(odd, {.cp = 2}, 2);
  pass(odd, {.cp = 4}, 2);
  pass(odd, {.cp = 2, .dp = 2, .ep = 4}, 1);
  pass(odd, {.cp = 2, .pp = 2}, 1);
  pass(delta_net_model(moe_models().front().config, 6),
       {.cp = 2, .tp = 2, .sequence_parallel = true}, 2);
  pass(delta_net_model(dense().config, 1), {.cp = 2}, 1);
  NamedModel predicting = delta_net_model(dense().config, 3);
  predicting.name += "_mtp";
  predicting.config.mtp_num_layers = 1;
  pass(predicting, {.cp = 2}, 1);
  // Beside a pipeline, and with the other dispatchers.
  const NamedModel model = moe_models().back();
  add(dense(), {.cp = 2, .pp = 2}, 2);
  add(model, {.cp = 2, .tp = 2, .ep = 2, .pp = 2, .sequence_parallel = true}, 2);
  for (const TokenDispatcher dispatcher : {TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    LayoutCase each = layout_case(model, {.cp = 2, .tp = 2, .ep = 4, .sequence_parallel = true},
                                  ContextExchange::p2p, 2);
    each.name += "_" + std::string(name_of(dispatcher));
    each.dispatcher = dispatcher;
    all.push_back(each);
  }
  return all;
}

class ContextParallelLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(ContextParallelLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, ContextParallelLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
