#include "program/verify.h"

#include <algorithm>
#include <string>
#include <vector>

#include "program/op_spec.h"

namespace troupe {
namespace {

std::string describe(const Program& program, int32_t index) {
  const Op& op = program.op(index);
  std::string text = "operation " + std::to_string(index) + " (" + op.spec->name + ")";
  for (const ValueId output : program.outputs(op)) {
    if (output.valid()) return text + " writing " + program.value(output).name;
  }
  return text;
}

void check_rows(const Program& program, const Value& value, int32_t index) {
  if (!value.rows.valid()) return;
  const Value& counter = program.value(value.rows.counter);
  TROUPE_CHECK(counter.dtype == DType::i32 && value.rows.element >= 0 &&
                   value.rows.element < counter.shape.elements(),
               describe(program, index) + ": bad row counter of " + value.name);
}

// Runs the shape rule once more, on a scratch copy that gets the rule's new values.
void check_signature(const Program& program, Program& scratch, int32_t index) {
  const Op& op = program.op(index);
  const std::string name;
  InferContext context(scratch, program.inputs(op), op.attributes, name);
  op.spec->infer(context);
  context.finish();
  const auto outputs = program.outputs(op);
  TROUPE_CHECK(context.outputs().size() == outputs.size(),
               describe(program, index) + ": number of outputs");
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Value& expected = scratch.value(context.outputs()[i]);
    const Value& actual = program.value(outputs[i]);
    // An output may count the rows of another one; the rule's own ids are then those of the copy.
    RowCount rows = expected.rows;
    for (size_t j = 0; j < outputs.size(); ++j) {
      if (rows.counter == context.outputs()[j]) rows.counter = outputs[j];
    }
    TROUPE_CHECK(
        expected.dtype == actual.dtype && expected.shape == actual.shape &&
            expected.role == actual.role && rows == actual.rows,
        describe(program, index) + ": " + actual.name + " has another type than its rule says");
  }
}

}  // namespace

void verify_program(const Program& program) {
  std::vector<bool> defined(static_cast<size_t>(program.value_count()), false);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    defined[static_cast<size_t>(i)] = is_state(value.role) || value.role == Role::input;
  }
  Program scratch = program;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    TROUPE_CHECK(op.spec != nullptr, "operation " + std::to_string(index) + " has no kind");
    const auto inputs = program.inputs(op);
    const auto outputs = program.outputs(op);
    const auto is_in_place = [&](ValueId output) {
      return std::find(inputs.begin(), inputs.end(), output) != inputs.end();
    };

    for (const ValueId input : inputs) {
      if (!input.valid()) continue;
      const Value& value = program.value(input);
      check_rows(program, value, index);
      // An in-place target that is only overwritten may be seen here for the first time.
      const bool first_write = value.role == Role::metric && is_in_place(input) &&
                               std::find(outputs.begin(), outputs.end(), input) != outputs.end();
      TROUPE_CHECK(defined[static_cast<size_t>(input.index)] || first_write,
                   describe(program, index) + " uses " + value.name + " before it is defined");
      if (value.rows.valid()) {
        TROUPE_CHECK(defined[static_cast<size_t>(value.rows.counter.index)],
                     describe(program, index) + " needs the row count of " + value.name +
                         " before it is defined");
      }
    }
    for (const ValueId output : outputs) {
      TROUPE_CHECK(output.valid(), describe(program, index) + ": an output is missing");
      const Value& value = program.value(output);
      check_rows(program, value, index);
      const auto position = static_cast<size_t>(output.index);
      if (is_in_place(output)) {
        TROUPE_CHECK(is_mutable(value.role),
                     describe(program, index) + " changes " + value.name + " in place");
      } else {
        TROUPE_CHECK(!defined[position],
                     describe(program, index) + " defines " + value.name + " a second time");
      }
      defined[position] = true;
    }
    check_signature(program, scratch, index);
  }
}

}  // namespace troupe
