#include "model/feed_forward.h"

#include "ops/combine/combine.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"
#include "ops/permute/permute.h"
#include "ops/route/route.h"
#include "ops/router_topk/router_topk.h"
#include "ops/router_z_loss/router_z_loss.h"
#include "ops/swiglu/swiglu.h"

namespace troupe {

ValueId build_dense_mlp(Builder& builder, const ModelState& state, int32_t layer, ValueId input) {
  const auto parameter = [&](ParameterKind kind) { return builder.state(state.find(kind, layer)); };
  const ValueId gate_up =
      linear(builder, input, parameter(ParameterKind::w_gate_up), {}, "gate_up");
  const ValueId activated = swiglu(builder, gate_up, {}, {}, "activated");
  return linear(builder, activated, parameter(ParameterKind::w_down), {}, "mlp_out");
}

ValueId build_moe(Builder& builder, const ModelConfig& config, const ModelState& state,
                  int32_t layer, ValueId input, bool training, ForwardResult& result) {
  const auto parameter = [&](ParameterKind kind) { return builder.state(state.find(kind, layer)); };
  using Loss = ForwardResult::AuxiliaryLoss;

  const ValueId logits =
      linear(builder, input, parameter(ParameterKind::w_router),
             {.bias = {}, .output = LinearOutput::accumulation}, "router_logits");
  const RouterTopkResult chosen = router_topk(builder, logits,
                                              {.top_k = config.moe_router_topk,
                                               .score_function = ScoreFunction::softmax,
                                               .pre_softmax = config.moe_router_pre_softmax,
                                               .scaling_factor = 1.0},
                                              "router_weights");
  const Routing routing =
      route(builder, chosen.indices, {.experts = config.num_experts}, "routing");
  result.expert_loads.push_back({layer, routing.counts});

  if (training && config.moe_aux_loss_coeff > 0) {
    const ValueId loss = load_balancing_loss(builder, logits, routing.counts,
                                             {.coefficient = config.moe_aux_loss_coeff,
                                              .top_k = config.moe_router_topk,
                                              .score_function = ScoreFunction::softmax},
                                             "load_balancing_loss");
    result.auxiliary_losses.push_back(
        {Loss::Kind::load_balancing, layer, config.moe_aux_loss_coeff, loss});
  }
  if (training && config.moe_z_loss_coeff > 0) {
    const ValueId loss =
        router_z_loss(builder, logits, {.coefficient = config.moe_z_loss_coeff}, "z_loss");
    result.auxiliary_losses.push_back({Loss::Kind::z_loss, layer, config.moe_z_loss_coeff, loss});
  }

  const ValueId rows = permute(builder, input, routing, "expert_in");
  const ValueId gate_up = grouped_linear(builder, rows, parameter(ParameterKind::w_gate_up),
                                         routing.offsets, "gate_up");
  const ValueId activated =
      swiglu(builder, gate_up, chosen.probabilities, routing.row_slot, "activated");
  const ValueId expert_out = grouped_linear(builder, activated, parameter(ParameterKind::w_down),
                                            routing.offsets, "expert_out");
  return combine(builder, expert_out, routing, "moe_out");
}

}  // namespace troupe
