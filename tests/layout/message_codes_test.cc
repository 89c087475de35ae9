// Rows of tokens that travel in 8 bits: whatever the layout and the dispatcher, the numbers are
// those of one rank, which rounds the same rows and sends nothing; and what is sent are codes.
#include "passes/message_codes.h"

#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "model/blocks/moe.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "support/layout_models.h"
#include "support/layout_run.h"

namespace troupe::testing {
namespace {

constexpr MessageRounding kBoth{.dispatched = true, .combine_gradients = true};

ModelConfig model_of_blocks() {
  ModelConfig model = auxiliary_loss_models(moe_model(2))[0].config;
  model.hidden_size = 64;
  return model;
}

LayoutCase case_of(int32_t ranks) {
  LayoutCase c;
  c.model = model_of_blocks();
  c.layout.world_size = ranks;
  c.layout.expert_tensor_parallel = 1;
  c.micro_batches = 2;
  c.precision = {.messages = kBoth};
  return c;
}

std::vector<LayoutCase> message_cases() {
  std::vector<LayoutCase> all;
  const auto add = [&](const std::string& name, int32_t ranks, const auto& configure) {
    for (const TokenDispatcher dispatcher :
         {TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex}) {
      LayoutCase c = case_of(ranks);
      c.name = name + "_" + std::string(name_of(dispatcher));
      c.dispatcher = dispatcher;
      configure(c);
      all.push_back(c);
    }
  };
  add("ep2", 2, [](LayoutCase& c) { c.layout.expert_parallel = 2; });
  add("etp2", 2, [](LayoutCase& c) { c.layout.expert_tensor_parallel = 2; });
  add("tp2_ep2_edp2", 4, [](LayoutCase& c) {
    c.layout.tensor_parallel = 2;
    c.layout.sequence_parallel = true;
    c.layout.expert_parallel = 2;
  });
  add("ep2_in_rounds", 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.expert_room = 0.5;
  });
  LayoutCase nodes = case_of(4);
  nodes.name = "ep4_on_two_nodes";
  nodes.layout.expert_parallel = 4;
  nodes.layout.dispatch_node_ranks = 2;
  nodes.dispatcher = TokenDispatcher::hierarchical;
  all.push_back(nodes);
  add("pp2_ep2_merged", 4, [](LayoutCase& c) {
    c.layout.pipeline_parallel = 2;
    c.layout.expert_parallel = 2;
    c.micro_batches = 4;
    c.merged = true;
  });
  add("ep2_in_products_of_8_bits", 2, [](LayoutCase& c) {
    c.layout.expert_parallel = 2;
    c.precision.recipe = Fp8Recipe::delayed;
    c.precision.format = Fp8Format::hybrid;
    c.amax_history = 2;
  });
  return all;
}

class MessageCodes : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(MessageCodes, AgreeWithOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, MessageCodes, ::testing::ValuesIn(message_cases()),
                         [](const auto& info) { return info.param.name; });

LayoutCase experts_apart(TokenDispatcher dispatcher) {
  LayoutCase c = case_of(2);
  c.layout.expert_parallel = 2;
  c.dispatcher = dispatcher;
  c.dtype = DType::bf16;
  return c;
}

TEST(MessageCodes, HaveTheBitsOfRowsThatAreSentAsTheyAre) {
  for (const TokenDispatcher dispatcher :
       {TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    LayoutCase c = experts_apart(dispatcher);
    const Outcome expected = run_layout(c);
    for (const uint32_t seed : {1U, 2U}) {
      expect_same_bits(expected, run_layout(c, {.interleaving = seed}));
    }
    LayoutCase recomputed = c;
    recomputed.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                            .modules = {&kExpertActivationModule, &kMoeModule}};
    expect_same_bits(expected, run_layout(recomputed));
    c.skipped_passes = {PassId::messages};
    expect_same_bits(expected, run_layout(c));
  }
}

TEST(MessageCodes, AreOtherNumbersOnTheWayThereAndBack) {
  std::set<Outcome> outcomes;
  for (const bool dispatched : {false, true}) {
    for (const bool combine_gradients : {false, true}) {
      LayoutCase c = experts_apart(TokenDispatcher::alltoall);
      c.precision.messages = {.dispatched = dispatched, .combine_gradients = combine_gradients};
      outcomes.insert(run_layout(c));
    }
  }
  EXPECT_EQ(outcomes.size(), 4U);
}

// How often a program exchanges rows as wide as the residual stream, as codes, and rounds rows.
struct Messages {
  int wide = 0;
  int codes = 0;
  int rounded = 0;
  bool operator==(const Messages&) const = default;
};

Messages messages_of(const LayoutCase& layout) {
  const std::unique_ptr<const Program> program = program_of(layout, 0);
  Messages found;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    const Op& op = program->op(index);
    if (op.spec == &kRoundRows || op.spec == &kRoundGradient) ++found.rounded;
    if (op.spec != &kSendRows && op.spec != &kPushRows && op.spec != &kAllGather) continue;
    for (const ValueId id : program->inputs(op)) {
      const Value& value = program->value(id);
      if (value.shape.rank() != 2) continue;
      if (value.dtype == DType::u8) ++found.codes;
      if (is_float(value.dtype) && value.shape[1] == layout.model.hidden_size) ++found.wide;
    }
  }
  return found;
}

// Of two layers and two micro-batches.
TEST(MessageCodes, AreWhatIsSent) {
  for (const TokenDispatcher dispatcher :
       {TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex}) {
    LayoutCase c = experts_apart(dispatcher);
    EXPECT_EQ(messages_of(c), (Messages{.wide = 0, .codes = 8, .rounded = 0}));
    c.precision.messages = {.dispatched = true};
    EXPECT_EQ(messages_of(c), (Messages{.wide = 4, .codes = 4, .rounded = 0}));
    c.precision.messages = {};
    EXPECT_EQ(messages_of(c), (Messages{.wide = 8, .codes = 0, .rounded = 0}));
  }
  LayoutCase alone = case_of(1);
  EXPECT_EQ(messages_of(alone), (Messages{.wide = 0, .codes = 0, .rounded = 8}));
}

}  // namespace
}  // namespace troupe::testing
