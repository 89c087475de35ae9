// A program: the flat, ordered list of operations of one rank's training step (or evaluation, or
// generation step), over numbered values. Data only; interpreters run it, passes rewrite it.
//
// A Program owns its values and operations and shares the StateTable. It is not thread-safe while
// being built; a finished program may be read from any thread.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "program/op.h"
#include "program/rank_group.h"
#include "program/value.h"

namespace troupe {

class Program {
 public:
  explicit Program(std::shared_ptr<const StateTable> state) : state_(std::move(state)) {}

  const StateTable& state() const { return *state_; }

  int32_t value_count() const { return static_cast<int32_t>(values_.size()); }
  const Value& value(ValueId id) const {
    TROUPE_CHECK(static_cast<size_t>(id.index) < values_.size(), "a value that is not there");
    return values_[static_cast<size_t>(id.index)];
  }

  int32_t op_count() const { return static_cast<int32_t>(ops_.size()); }
  const Op& op(int32_t index) const { return ops_[static_cast<size_t>(index)]; }

  // Operands in the order of the operation's signature. An optional input that is absent is an
  // invalid ValueId. An output that is also an input is changed in place.
  std::span<const ValueId> inputs(const Op& op) const {
    return {operands_.data() + op.first_operand, op.input_count};
  }
  std::span<const ValueId> outputs(const Op& op) const {
    return {operands_.data() + op.first_operand + op.input_count, op.output_count};
  }

  // Adds a value. State must be added through state_value().
  ValueId add_value(Value value);
  // The value that stands for a state tensor in this program; created on first use.
  ValueId state_value(StateId id);
  // As above, but does not create: invalid when the program does not touch this tensor.
  ValueId find_state_value(StateId id) const;

  // Appends an operation; `op.first_operand` and the counts are set from the spans.
  void add_op(Op op, std::span<const ValueId> inputs, std::span<const ValueId> outputs);

  // Books private memory for the operation at `index`.
  void set_workspace(int32_t index, ValueId workspace) {
    ops_[static_cast<size_t>(index)].workspace = workspace;
  }

  // Values (besides metrics) that the host reads after a run: they stay alive to the end.
  void add_result(ValueId id) { results_.push_back(id); }
  std::span<const ValueId> results() const { return results_; }

  // Of a program for a GPU. Operations of such groups need memory to receive into
  // (KernelNeeds::staging).
  void set_staged_groups(const StagedGroups& staged) { staged_groups_ = staged; }
  const StagedGroups& staged_groups() const { return staged_groups_; }

  // Says which phase the operation at `index` belongs to (the autodiff pass learns it afterwards).
  void set_phase(int32_t index, Phase phase) {
    ops_[static_cast<size_t>(index)].place.phase = phase;
  }

  void set_multiprocessors(int32_t index, const Multiprocessors& multiprocessors) {
    ops_[static_cast<size_t>(index)].multiprocessors = multiprocessors;
  }

  // Lets the operation at `index` read `to` wherever it reads `from`, a value of the same type: as
  // an operand, and as the counter of its outputs' rows.
  void replace_read(int32_t index, ValueId from, ValueId to);

  // The same program with as many rows in ragged tensors as are expected, or `load(layer)` times as
  // many, up to their bound: what an operation's cost is asked of. It cannot be run.
  using LoadOfLayer = std::function<double(int32_t layer)>;
  Program with_expected_rows(const LoadOfLayer& load = nullptr) const;

  // Replaces the list of operations by a selection of its elements in a new order (for passes that
  // reorder or remove). Values are untouched.
  void select_ops(std::span<const int32_t> order);

 private:
  std::shared_ptr<const StateTable> state_;
  std::vector<Value> values_;
  std::vector<Op> ops_;
  std::vector<ValueId> operands_;
  std::vector<ValueId> value_of_state_;
  std::vector<ValueId> results_;
  StagedGroups staged_groups_{};
};

// An operation together with its program: what the functions of an OpSpec read.
struct OpView {
  const Program& program;
  const Op& op;

  template <class T>
  const T& attributes() const {
    return op.attributes.as<T>();
  }
  bool has_input(int i) const { return operand_at(program.inputs(op), i).valid(); }
  const Value& input(int i) const { return program.value(operand_at(program.inputs(op), i)); }
  const Value& output(int i) const { return program.value(operand_at(program.outputs(op), i)); }
};

}  // namespace troupe
