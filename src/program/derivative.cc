#include "program/derivative.h"

namespace troupe {

ValueId DerivativeContext::input(int i) const {
  const OpView view = op();
  return view.program.inputs(view.op)[static_cast<size_t>(i)];
}

ValueId DerivativeContext::output(int i) const {
  const OpView view = op();
  return view.program.outputs(view.op)[static_cast<size_t>(i)];
}

const std::string& DerivativeContext::input_name(int i) const {
  return builder_.value(input(i)).name;
}

ValueId DerivativeContext::output_gradient(int i) const {
  const ValueId id = output(i);
  return table_.gradient.has(id) ? table_.gradient[id] : ValueId{};
}

bool DerivativeContext::wants(int i) const {
  const ValueId id = input(i);
  return id.valid() && table_.wanted.has(id) && table_.wanted[id];
}

void DerivativeContext::add_gradient(int i, ValueId gradient) {
  const ValueId id = input(i);
  TROUPE_CHECK(wants(i), "a gradient that is not needed: " + input_name(i));
  TROUPE_CHECK(gradient.valid(), "missing gradient of " + input_name(i));
  TROUPE_CHECK(!is_state(builder_.value(id).role),
               "weight gradients go through add_weight_gradient: " + input_name(i));
  TROUPE_CHECK(builder_.value(gradient).shape == builder_.value(id).shape,
               "gradient of another shape: " + input_name(i));
  table_.arrived.push_back({id, gradient});
}

DerivativeContext::WeightTarget DerivativeContext::weight_target(int i) {
  const Value& weight = builder_.value(input(i));
  if (!is_state(weight.role)) return {};
  const StateId gradient = builder_.program().state()[weight.state].gradient;
  TROUPE_CHECK(gradient.valid(), "a parameter without main gradient: " + weight.name);
  const bool accumulate = table_.gradient_written[gradient];
  return {builder_.state(gradient), accumulate};
}

void DerivativeContext::add_weight_gradient(int i, ValueId gradient) {
  const Value& weight = builder_.value(input(i));
  if (!is_state(weight.role)) {
    add_gradient(i, gradient);
    return;
  }
  const StateId target = builder_.program().state()[weight.state].gradient;
  TROUPE_CHECK(builder_.value(gradient).state == target,
               "weight gradient written elsewhere: " + weight.name);
  table_.gradient_written[target] = true;
}

void declare_weight_gradient(InferContext& context, int target_index, const std::string& suffix,
                             DType weight_dtype, const Shape& shape) {
  if (!context.has_input(target_index)) {
    context.output(suffix, accumulation_dtype(weight_dtype), shape);
    return;
  }
  const Value& target = context.input(target_index);
  TROUPE_CHECK(target.shape == shape, "weight gradient of another shape: " + target.name);
  TROUPE_CHECK(
      target.dtype == accumulation_dtype(weight_dtype) || target.dtype == weight_dtype,
      "weight gradients have the weight's dtype or its accumulation dtype: " + target.name);
  context.mutates(target_index);
}

}  // namespace troupe
