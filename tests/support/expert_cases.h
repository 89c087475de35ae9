// Experts spread over four ranks, which the tests of limited rooms and of copies share.
#pragma once

#include "model/blocks/moe.h"
#include "support/layout_run.h"

namespace troupe::testing {

// Eight experts of this model over four ranks, two micro-batches.
inline LayoutCase experts_of_four(const ModelConfig& model, TokenDispatcher dispatcher) {
  LayoutCase c;
  c.model = model;
  c.model.num_experts = 8;
  c.layout.world_size = 4;
  c.layout.expert_parallel = 4;
  c.layout.expert_tensor_parallel = 1;
  c.dispatcher = dispatcher;
  if (dispatcher == TokenDispatcher::hierarchical) c.layout.dispatch_node_ranks = 2;
  c.micro_batches = 2;
  return c;
}

// `kept`: what the case leaves, also with each of these.
inline void expect_same_with_recompute_offload_and_overlap(const Outcome& kept, LayoutCase c) {
  c.recompute = {.granularity = RecomputeOptions::Granularity::full, .layers = 2};
  expect_same_bits(kept, run_layout(c));
  c.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                 .modules = {&kMoeModule, &kExpertActivationModule}};
  expect_same_bits(kept, run_layout(c));
  c.recompute = {};
  c.offload = {.modules = {&kExpertFc1Module, &kExpertActivationModule}, .fraction = 1};
  expect_same_bits(kept, run_layout(c));
  c.offload = {};
  c.overlap = {.delay_weight_gradients = true};
  c.merged = true;
  expect_same_bits(kept, run_layout(c));
}

}  // namespace troupe::testing
