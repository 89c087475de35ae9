#include "model/blocks/dense_mlp.h"

#include "model/layout_rules.h"
#include "model/tensor_parallel.h"
#include "ops/products/linear/linear.h"

namespace troupe {

MlpSpec mlp_spec_of(const ModelConfig& config, int32_t width) {
  return {.hidden = config.hidden_size,
          .width = width,
          .activation = {.function = config.activation,
                         .gated = config.gated_linear_unit,
                         .clamp = config.activation_clamp,
                         .linear_offset = config.glu_linear_offset},
          .has_bias = config.add_bias_linear};
}

ActivationAttributes activation_in(const ForwardOptions& pass, const MlpSpec& spec) {
  ActivationAttributes attributes = spec.activation;
  attributes.stores_input = pass.training && pass.stores_activation_inputs;
  return attributes;
}

Cut cut_first_product(int dimension, CutOver over, const MlpSpec& spec) {
  const CutSection half{.size = spec.width, .units = spec.width};
  Cut cut{.dimension = dimension, .over = over, .sections = {half}};
  if (spec.activation.gated) cut.sections.push_back(half);
  return cut;
}

DenseMlp::DenseMlp(ParameterList& parameters, const MlpSpec& spec, int32_t layer)
    : LayerBlock(layer), spec_(spec) {
  const Cut rows = cut_first_product(0, CutOver::tp, spec);
  w_gate_up_ = parameters.weight("w_gate_up", {spec.rows(), spec.hidden},
                                 {.cuts = {rows}, .products = ProductGroup::mlp});
  if (spec.has_bias) b_gate_up_ = parameters.bias("b_gate_up", {spec.rows()}, {.cuts = {rows}});
  w_down_ = parameters.weight(
      "w_down", {spec.hidden, spec.width},
      {.cuts = {cut_anywhere(1, CutOver::tp, spec.width, "the dense layers' inner size")},
       .is_into_stream = true,
       .products = ProductGroup::mlp});
  if (spec.has_bias) {
    b_down_ =
        parameters.bias("b_down", {spec.hidden}, {.gradient_class = GradientClass::replicated});
  }
}

ValueId DenseMlp::build(const BlockContext& context, ValueId input) const {
  Builder& builder = context.builder;
  builder.place.module = &kMlpModule;
  const TensorParallel tensor_parallel(builder, context.part());
  const ValueId rows = tensor_parallel.enter(input, "ffn_in_all");
  const ValueId gate_up = linear(builder, rows, context.parameter(w_gate_up_),
                                 {.bias = context.parameter(b_gate_up_)}, "gate_up");
  const ValueId activated =
      activation(builder, gate_up, {}, {}, activation_in(context.options, spec_), "activated");
  return leave_linear(builder, tensor_parallel, activated, context.parameter(w_down_),
                      context.parameter(b_down_), "mlp_out");
}

std::optional<Refusal> DenseMlp::check_layout(const Layout& layout, ContextExchange) const {
  return require_divisor(Setting::tensor_parallel, layout.tp(), spec_.width,
                         "the dense layers' inner size");
}

}  // namespace troupe
