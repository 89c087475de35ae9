#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "program/communicator.h"

namespace troupe {

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "forward";
    case Phase::data_gradient:
      return "dgrad";
    case Phase::weight_gradient:
      return "wgrad";
    case Phase::recompute:
      return "recompute";
    case Phase::optimizer:
      return "optimizer";
  }
  return "?";
}

std::string_view name_of(RankGroup group) {
  static constexpr std::array<std::string_view, kRankGroupCount> kNames = {"world",
                                                                           "tp",
                                                                           "cp",
                                                                           "dp",
                                                                           "pp",
                                                                           "dp-cp",
                                                                           "tp-cp",
                                                                           "tp-dp-cp",
                                                                           "tp-pp",
                                                                           "ep",
                                                                           "etp",
                                                                           "edp",
                                                                           "etp-ep",
                                                                           "etp-ep-across-nodes",
                                                                           "etp-ep-within-node",
                                                                           "etp-ep-pp",
                                                                           "embedding",
                                                                           "kv-replicas",
                                                                           "dp-cp-within-instance",
                                                                           "dp-cp-across-instances",
                                                                           "edp-within-instance",
                                                                           "edp-across-instances",
                                                                           "optimizer-instance"};
  return kNames[static_cast<size_t>(group)];
}

std::string_view name_of(Queue queue) {
  switch (queue) {
    case Queue::compute:
      return "compute";
    case Queue::copy:
      return "copy";
    case Queue::communication:
      return "comm";
  }
  return "?";
}

ValueId Program::add_value(Value value) {
  TROUPE_CHECK(is_state(value.role) == value.state.valid(),
               "state and only state carries a StateId: " + value.name);
  values_.push_back(std::move(value));
  return ValueId{value_count() - 1};
}

ValueId Program::state_value(StateId id) {
  if (value_of_state_.size() < static_cast<size_t>(state_->size())) {
    value_of_state_.resize(static_cast<size_t>(state_->size()));
  }
  ValueId& value = value_of_state_[static_cast<size_t>(id.index)];
  if (!value.valid()) {
    const StateTensor& tensor = (*state_)[id];
    value = add_value(Value{.name = tensor.name,
                            .dtype = tensor.dtype,
                            .shape = tensor.shape,
                            .role = tensor.role,
                            .rows = {},
                            .state = id});
  }
  return value;
}

ValueId Program::find_state_value(StateId id) const {
  const auto index = static_cast<size_t>(id.index);
  return index < value_of_state_.size() ? value_of_state_[index] : ValueId{};
}

void Program::add_op(Op op, std::span<const ValueId> inputs, std::span<const ValueId> outputs) {
  op.first_operand = static_cast<uint32_t>(operands_.size());
  op.input_count = static_cast<uint16_t>(inputs.size());
  op.output_count = static_cast<uint16_t>(outputs.size());
  TROUPE_CHECK(op.input_count == inputs.size() && op.output_count == outputs.size(),
               "an operation has at most 65535 operands");
  operands_.insert(operands_.end(), inputs.begin(), inputs.end());
  operands_.insert(operands_.end(), outputs.begin(), outputs.end());
  ops_.push_back(op);
}

Program Program::with_expected_rows(const LoadOfLayer& load) const {
  Program expected = *this;
  for (const Op& op : ops_) {
    for (const ValueId id : outputs(op)) {
      Value& value = expected.values_[static_cast<size_t>(id.index)];
      int64_t rows = value.rows.expected;
      if (load && rows > 0) {
        rows = std::llround(static_cast<double>(rows) * load(op.place.layer));
      }
      if (rows == 0 || rows >= value.shape[0]) continue;
      std::vector<int64_t> extents{rows};
      for (int i = 1; i < value.shape.rank(); ++i) extents.push_back(value.shape[i]);
      value.shape = Shape(extents);
    }
  }
  return expected;
}

void Program::replace_read(int32_t index, ValueId from, ValueId to) {
  const Op& op = ops_[static_cast<size_t>(index)];
  ValueId* operands = operands_.data() + op.first_operand;
  std::replace(operands, operands + op.input_count, from, to);
  for (const ValueId output : outputs(op)) {
    RowCount& rows = values_[static_cast<size_t>(output.index)].rows;
    if (rows.valid() && rows.counter == from) rows.counter = to;
  }
}

void Program::select_ops(std::span<const int32_t> order) {
  std::vector<int32_t> place(ops_.size(), -1);
  for (size_t i = 0; i < order.size(); ++i) {
    place[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  }
  std::vector<Op> selected;
  selected.reserve(order.size());
  for (const int32_t index : order) {
    Op& op = selected.emplace_back(ops_[static_cast<size_t>(index)]);
    int32_t& original = op.place.recompute_of;
    if (original >= 0) original = place[static_cast<size_t>(original)];
  }
  ops_ = std::move(selected);
}

}  // namespace troupe
