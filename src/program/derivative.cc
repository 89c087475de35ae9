#include "program/derivative.h"

namespace troupe {

ValueId DerivativeContext::own_input(int i) const {
  const OpView view = op();
  return view.program.inputs(view.op)[static_cast<size_t>(i)];
}

ValueId DerivativeContext::own_output(int i) const {
  const OpView view = op();
  return view.program.outputs(view.op)[static_cast<size_t>(i)];
}

ValueId DerivativeContext::input(int i) const {
  return readable(own_input(i));
}

ValueId DerivativeContext::output(int i) const {
  return readable(own_output(i));
}

ValueId DerivativeContext::readable(ValueId id) const {
  const auto index = static_cast<size_t>(id.index);
  if (!id.valid() || index >= table_.repeated.size() || table_.repeated[index] < 0) return id;
  if (!table_.stand_in[index].valid()) repeat(table_.repeated[index]);
  return table_.stand_in[index];
}

void DerivativeContext::repeat(int32_t index) const {
  const Program& program = builder_.program();
  const Op op = program.op(index);
  std::vector<ValueId> inputs;
  for (const ValueId input : program.inputs(op)) inputs.push_back(readable(input));
  const std::vector<ValueId> outputs(program.outputs(op).begin(), program.outputs(op).end());
  const Place caller_place = builder_.place;
  builder_.place = op.place;
  builder_.place.phase = Phase::recompute;
  builder_.place.recompute_of = index;
  const std::string name = program.value(outputs.front()).name;
  const std::vector<ValueId> again = builder_.emit(*op.spec, op.attributes, inputs, name);
  builder_.place = caller_place;
  for (size_t i = 0; i < outputs.size(); ++i) {
    table_.stand_in[static_cast<size_t>(outputs[i].index)] = again[i];
  }
}

const std::string& DerivativeContext::input_name(int i) const {
  return builder_.value(own_input(i)).name;
}

ValueId DerivativeContext::output_gradient(int i) const {
  const auto index = static_cast<size_t>(own_output(i).index);
  return index < table_.gradient.size() ? table_.gradient[index] : ValueId{};
}

bool DerivativeContext::wants(int i) const {
  const ValueId id = own_input(i);
  return id.valid() && static_cast<size_t>(id.index) < table_.wanted.size() &&
         table_.wanted[static_cast<size_t>(id.index)];
}

void DerivativeContext::add_gradient(int i, ValueId gradient) {
  TROUPE_CHECK(wants(i), "a gradient nobody wants: " + input_name(i));
  TROUPE_CHECK(gradient.valid(), "missing gradient of " + input_name(i));
  TROUPE_CHECK(!is_state(builder_.value(own_input(i)).role),
               "weight gradients go through add_weight_gradient: " + input_name(i));
  TROUPE_CHECK(builder_.value(gradient).shape == builder_.value(own_input(i)).shape,
               "gradient of another shape: " + input_name(i));
  table_.arrived.push_back({own_input(i), gradient});
}

DerivativeContext::WeightTarget DerivativeContext::weight_target(int i) {
  const Value& weight = builder_.value(own_input(i));
  if (!is_state(weight.role)) return {};
  const StateId gradient = builder_.program().state()[weight.state].gradient;
  TROUPE_CHECK(gradient.valid(), "a parameter without main gradient: " + weight.name);
  const bool accumulate = table_.gradient_written[static_cast<size_t>(gradient.index)];
  return {builder_.state(gradient), accumulate};
}

void DerivativeContext::add_weight_gradient(int i, ValueId gradient) {
  const Value& weight = builder_.value(own_input(i));
  if (!is_state(weight.role)) {
    add_gradient(i, gradient);
    return;
  }
  const StateId target = builder_.program().state()[weight.state].gradient;
  TROUPE_CHECK(builder_.value(gradient).state == target,
               "weight gradient written elsewhere: " + weight.name);
  table_.gradient_written[static_cast<size_t>(target.index)] = true;
}

void declare_weight_gradient(InferContext& context, int target_index, const std::string& suffix,
                             DType weight_dtype, const Shape& shape) {
  if (!context.has_input(target_index)) {
    context.output(suffix, accumulation_dtype(weight_dtype), shape);
    return;
  }
  const Value& target = context.input(target_index);
  TROUPE_CHECK(target.shape == shape, "weight gradient of another shape: " + target.name);
  TROUPE_CHECK(target.dtype == accumulation_dtype(weight_dtype),
               "weight gradients have the accumulation dtype: " + target.name);
  context.mutates(target_index);
}

}  // namespace troupe
