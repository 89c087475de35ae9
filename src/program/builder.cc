#include "program/builder.h"

#include <algorithm>

namespace troupe {

void InferContext::output(const std::string& suffix, DType dtype, const Shape& shape, RowCount rows,
                          Role role) {
  TROUPE_CHECK(!is_state(role), "an operation cannot define state");
  Value value;
  value.name = suffix.empty() ? name_ : name_ + "." + suffix;
  value.dtype = dtype;
  value.shape = shape;
  value.role = role;
  value.rows = rows;
  outputs_.push_back(ValueId{program_.value_count() + static_cast<int32_t>(new_values_.size())});
  new_values_.push_back(std::move(value));
}

void InferContext::mutates(int i) {
  TROUPE_CHECK(is_mutable(input(i).role), "cannot be changed in place: " + input(i).name);
  outputs_.push_back(input_id(i));
}

void InferContext::finish() {
  for (Value& value : new_values_) program_.add_value(std::move(value));
  new_values_.clear();
}

ValueId Builder::input(const std::string& name, DType dtype, const Shape& shape) {
  return program_.add_value(
      Value{.name = name, .dtype = dtype, .shape = shape, .role = Role::input, .rows = {}});
}

ValueId Builder::metric(const std::string& name, DType dtype, const Shape& shape) {
  return program_.add_value(
      Value{.name = name, .dtype = dtype, .shape = shape, .role = Role::metric, .rows = {}});
}

std::vector<ValueId> Builder::emit(const OpSpec& spec, const Attributes& attributes,
                                   std::span<const ValueId> inputs, const std::string& name) {
  for (const ValueId input : inputs) {
    TROUPE_CHECK(!input.valid() || input.index < program_.value_count(),
                 std::string(spec.name) + " refers to a value that does not exist");
  }
  InferContext context(program_, inputs, attributes, name);
  spec.infer(context);
  context.finish();
  const std::vector<ValueId>& outputs = context.outputs();
  // What a collective does may be all at another rank.
  TROUPE_CHECK(!outputs.empty() || spec.group != nullptr,
               std::string(spec.name) + " declares no output");

  Op op;
  op.spec = &spec;
  op.attributes = attributes;
  op.place = place;
  program_.add_op(op, inputs, outputs);
  if (spec.cpu.workspace != nullptr) {
    const int32_t index = program_.op_count() - 1;
    const uint64_t bytes = spec.cpu.workspace(OpView{program_, program_.op(index)});
    if (bytes > 0) {
      const ValueId workspace = program_.add_value(Value{.name = name + ".workspace",
                                                         .dtype = DType::u8,
                                                         .shape = {static_cast<int64_t>(bytes)},
                                                         .role = Role::workspace,
                                                         .rows = {}});
      program_.set_workspace(index, workspace);
    }
  }
  return outputs;
}

}  // namespace troupe
