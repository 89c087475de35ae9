// A Mixture of Experts: router, permutation by expert, experts, combination, and a shared expert by
// choice (docs/routing.md). The router's weights are applied between the activation and the second
// product, so that expert outputs need not be saved for the router's gradient.
//
// Parameters: w_router [experts, hidden], b_router; w_gate_up [experts, rows, hidden] and w_down
// [experts, hidden, width] with b_gate_up and b_down, as of dense_mlp.h for each expert;
// w_shared_gate_up, w_shared_down, w_shared_gate [1, hidden]. The state of the router is its
// expert_bias. EP shares the experts, ETP each of them; ranks of tp share the shared expert.
#pragma once

#include "model/blocks/dense_mlp.h"
#include "model/layer_block.h"
#include "program/module.h"

namespace troupe {

// Router, dispatch, experts, combination and shared expert.
inline constexpr ModuleSpec kMoeModule{
    .recompute = "moe", .products = ProductGroup::experts, .exchanges_tokens = true};
// The rows of the experts, gathered from tokens. They are not kept if gathered again.
inline constexpr ModuleSpec kExpertRowsModule{
    .part_of = &kMoeModule, .recompute = "moe_permute", .discards_outputs = true};
// The experts' first product.
inline constexpr ModuleSpec kExpertFc1Module{
    .part_of = &kMoeModule, .offload = "expert_fc1", .products = ProductGroup::experts};
inline constexpr ModuleSpec kExpertActivationModule{
    .part_of = &kMoeModule, .recompute = "moe_act", .offload = "moe_act", .discards_outputs = true};
inline constexpr ModuleSpec kSharedExpertModule{.part_of = &kMoeModule,
                                                .recompute = "shared_experts",
                                                .products = ProductGroup::shared_experts,
                                                .runs_beside_exchanges = true};

class Moe : public LayerBlock {
 public:
  // Keeps a reference to the configuration, whose options of routers are those of all layers.
  Moe(ParameterList& parameters, const ModelConfig& config, int32_t layer);

  // Appends the layer's auxiliary losses (in training) and its report to context.result.
  ValueId build(const BlockContext& context, ValueId input) const override;
  double forward_flops(int64_t sequence) const override;
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

  struct Parameters {
    ParameterId w_router;
    ParameterId b_router;
    ParameterId w_gate_up;
    ParameterId b_gate_up;
    ParameterId w_down;
    ParameterId b_down;
    ParameterId w_shared_gate_up;
    ParameterId w_shared_down;
    ParameterId w_shared_gate;
  };

 private:
  const ModelConfig& config_;
  const MlpSpec expert_;
  const MlpSpec shared_;  // width 0: there is none
  Parameters parameters_;
};

}  // namespace troupe
