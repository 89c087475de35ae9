#include "passes/autodiff.h"

#include <utility>

#include "ops/elementwise/add/add.h"
#include "program/derivative.h"

namespace troupe {
namespace {

bool has_main_gradient(const Program& program, const Value& value) {
  return value.role == Role::parameter && program.state()[value.state].gradient.valid();
}

// Marks every value that the stretch uses and that depends on something whose gradient is needed.
IdVector<ValueId, bool> find_wanted(const Program& program, int32_t first, int32_t last,
                                    std::span<const ValueId> differentiable_inputs) {
  IdVector<ValueId, bool> wanted(program.value_count(), false);
  for (const ValueId id : differentiable_inputs) wanted[id] = true;
  for (int32_t index = first; index < last; ++index) {
    const Op& op = program.op(index);
    if (op.spec->differentiate == nullptr) continue;
    bool any = false;
    for (const ValueId input : program.inputs(op)) {
      if (!input.valid()) continue;
      if (has_main_gradient(program, program.value(input))) wanted[input] = true;
      any = any || wanted[input];
    }
    if (!any) continue;
    for (const ValueId output : program.outputs(op)) {
      if (is_float(program.value(output).dtype)) wanted[output] = true;
    }
  }
  return wanted;
}

bool writes_main_gradient(const Program& program, const Op& op) {
  for (const ValueId output : program.outputs(op)) {
    if (program.value(output).role == Role::gradient) return true;
  }
  return false;
}

// Where a collective sums a weight's gradient into the main gradient, what makes only its terms is
// a weight-gradient operation, too.
void mark_terms_of_sums(Program& program, int32_t first) {
  IdVector<ValueId, int32_t> uses(program.value_count());
  IdVector<ValueId, int32_t> producer(program.value_count(), -1);
  for (int32_t index = first; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    for (const ValueId input : program.inputs(op)) {
      if (input.valid()) ++uses[input];
    }
    for (const ValueId output : program.outputs(op)) {
      producer[output] = index;
    }
  }
  for (int32_t index = first; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec->group == nullptr || op.place.phase != Phase::weight_gradient) continue;
    const ValueId term = program.inputs(op).front();
    const int32_t made = producer[term];
    if (made < 0 || uses[term] > 1) continue;
    if (program.outputs(program.op(made)).size() > 1) continue;
    program.set_phase(made, Phase::weight_gradient);
  }
}

}  // namespace

IdVector<ValueId, ValueId> append_backward(Builder& builder, int32_t first, int32_t last,
                                           std::span<const GradientSeed> seeds,
                                           std::span<const ValueId> differentiable_inputs,
                                           MainGradients& main_gradients) {
  Program& program = builder.program();
  GradientTable table;
  table.wanted = find_wanted(program, first, last, differentiable_inputs);
  table.gradient.resize(program.value_count());
  table.gradient_written = std::move(main_gradients.written);
  for (const GradientSeed& seed : seeds) {
    TROUPE_CHECK(builder.value(seed.gradient).shape == builder.value(seed.value).shape,
                 "a seed has the shape of its value: " + builder.value(seed.value).name);
    ValueId& gradient = table.gradient[seed.value];
    TROUPE_CHECK(!gradient.valid(), "seeded twice: " + builder.value(seed.value).name);
    gradient = seed.gradient;
  }

  const PlaceScope scope(builder);
  const int32_t first_gradient = program.op_count();
  for (int32_t index = last - 1; index >= first; --index) {
    const Op op = program.op(index);
    if (op.spec->differentiate == nullptr) continue;
    bool arrived = false;
    bool wanted = false;
    for (const ValueId output : program.outputs(op)) {
      arrived = arrived || table.gradient[output].valid();
    }
    for (const ValueId input : program.inputs(op)) {
      wanted = wanted || (input.valid() && table.wanted[input]);
    }
    if (!arrived || !wanted) continue;

    builder.place = op.place;
    builder.place.phase = Phase::data_gradient;
    builder.place.queue = Queue::compute;
    const int32_t before = program.op_count();
    DerivativeContext context(builder, table, index);
    op.spec->differentiate(context);
    for (int32_t emitted = before; emitted < program.op_count(); ++emitted) {
      if (writes_main_gradient(program, program.op(emitted))) {
        program.set_phase(emitted, Phase::weight_gradient);
      }
    }
    for (const auto& [value, gradient] : std::exchange(table.arrived, {})) {
      ValueId& sum = table.gradient[value];
      sum = sum.valid() ? add(builder, sum, gradient, "d_" + program.value(value).name) : gradient;
    }
  }
  mark_terms_of_sums(program, first_gradient);
  main_gradients.written = std::move(table.gradient_written);
  return std::move(table.gradient);
}

}  // namespace troupe
