// A dense MLP: two products with an activation between them, gated or not, with biases by choice.
//
//   branch = activation(x w_gate_up^T + b_gate_up) w_down^T + b_down
//
// Parameters: w_gate_up [rows, hidden], gate rows before linear rows (rows: 2 width when gated),
// b_gate_up, w_down [hidden, width], b_down. Ranks of tp share the inner size.
#pragma once

#include "model/layer_block.h"
#include "ops/elementwise/activation/activation.h"
#include "program/module.h"

namespace troupe {

inline constexpr ModuleSpec kMlpModule{.recompute = "mlp", .products = ProductGroup::mlp};

struct MlpSpec {
  int32_t hidden = 0;
  int32_t width = 0;  // the inner size
  ActivationAttributes activation = {};
  bool has_bias = false;

  int64_t rows() const { return activation.gated ? 2 * int64_t{width} : width; }
  // In products, of one token.
  double flops() const { return 2.0 * hidden * static_cast<double>(rows() + width); }
};
// The block's activation in a forward pass.
ActivationAttributes activation_in(const ForwardOptions& pass, const MlpSpec& spec);

// Of the configuration's activation and hidden size.
MlpSpec mlp_spec_of(const ModelConfig& config, int32_t width);

// Rows of a first product, gate rows before linear rows: each half is cut by itself.
Cut cut_first_product(int dimension, CutOver over, const MlpSpec& spec);

class DenseMlp : public LayerBlock {
 public:
  DenseMlp(ParameterList& parameters, const MlpSpec& spec, int32_t layer);

  ValueId build(const BlockContext& context, ValueId input) const override;
  double forward_flops(int64_t) const override { return spec_.flops(); }
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

 private:
  const MlpSpec spec_;
  ParameterId w_gate_up_;
  ParameterId b_gate_up_;
  ParameterId w_down_;
  ParameterId b_down_;
};

}  // namespace troupe
