// What is drawn at random in training follows the element's place in the whole micro-batch: models
// with dropout, jitter and random routing compute in any layout what one rank computes. And what a
// norm over all heads sums up is that of all ranks' heads.
#include <gtest/gtest.h>

#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

void drop(ModelConfig& config) {
  config.num_query_groups = 4;
  config.hidden_dropout = 0.2;
  config.attention_dropout = 0.3;
}

NamedModel dense() {
  ModelConfig config = dense_model(2);
  drop(config);
  return {"dense", config};
}

NamedModel jitter() {
  ModelConfig config = moe_model(2);
  drop(config);
  config.hidden_size = 30;  // rows that do not fill whole groups of random numbers
  config.moe_aux_loss_coeff = 0.5;
  config.moe_input_jitter_eps = 0.3;
  return {"jitter", config};
}

NamedModel random_routing() {
  ModelConfig config = moe_model(2);
  drop(config);
  config.moe_router_force_load_balancing = true;
  return {"random_routing", config};
}

// As OLMoE has them.
NamedModel norms_of_projections() {
  ModelConfig config = moe_model(2);
  config.num_query_groups = 4;
  config.qk_layernorm = true;
  config.qk_norm_scope = QkNormScope::projection;
  return {"norms_of_projections", config};
}

struct Ranks {
  int32_t tp = 1;
  int32_t cp = 1;
  int32_t dp = 1;
  int32_t ep = 1;
  bool sequence_parallel = false;
};

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const NamedModel& model, const Ranks& ranks,
                       ContextExchange exchange = ContextExchange::p2p) {
    LayoutCase each;
    each.name = model.name + "_tp" + std::to_string(ranks.tp) + "_cp" + std::to_string(ranks.cp) +
                "_dp" + std::to_string(ranks.dp) + "_ep" + std::to_string(ranks.ep) +
                (ranks.sequence_parallel ? "_sp" : "");
    if (ranks.cp > 1) each.name += "_" + std::string(name_of(exchange));
    each.model = model.config;
    each.layout.world_size = ranks.tp * ranks.cp * ranks.dp;
    each.layout.tensor_parallel = ranks.tp;
    each.layout.context_parallel = ranks.cp;
    each.layout.expert_parallel = ranks.ep;
    each.layout.expert_tensor_parallel = 1;
    each.layout.sequence_parallel = ranks.sequence_parallel;
    each.micro_batch_size = 2;
    each.micro_batches = 2;
    each.context_exchange = exchange;
    all.push_back(each);
  };
  const auto add_exchanges = [&](const NamedModel& model, const Ranks& ranks) {
    for (const ContextExchange exchange :
         {ContextExchange::p2p, ContextExchange::a2a, ContextExchange::allgather}) {
      add(model, ranks, exchange);
    }
  };
  add(dense(), {.tp = 2});
  add(dense(), {.tp = 4, .sequence_parallel = true});
  add_exchanges(dense(), {.cp = 2});
  add_exchanges(dense(), {.tp = 2, .cp = 2});
  for (const NamedModel& model : {jitter(), random_routing()}) {
    add(model, {.tp = 2, .sequence_parallel = true});
    add(model, {.dp = 2, .ep = 2});
    add(model, {.tp = 2, .ep = 2, .sequence_parallel = true});
    add_exchanges(model, {.cp = 2, .ep = 2});
    add_exchanges(model, {.tp = 2, .cp = 2, .ep = 4, .sequence_parallel = true});
  }
  add(norms_of_projections(), {.tp = 2, .sequence_parallel = true});
  add(norms_of_projections(), {.tp = 4, .sequence_parallel = true});
  add(norms_of_projections(), {.tp = 2, .cp = 2, .sequence_parallel = true}, ContextExchange::a2a);
  return all;
}

class RandomNumbersLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(RandomNumbersLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, RandomNumbersLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
