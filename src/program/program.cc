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
  switch (group) {
    case RankGroup::world:
      return "world";
    case RankGroup::tp:
      return "tp";
    case RankGroup::cp:
      return "cp";
    case RankGroup::dp:
      return "dp";
    case RankGroup::pp:
      return "pp";
    case RankGroup::dp_cp:
      return "dp-cp";
    case RankGroup::tp_cp:
      return "tp-cp";
    case RankGroup::tp_dp_cp:
      return "tp-dp-cp";
    case RankGroup::tp_pp:
      return "tp-pp";
    case RankGroup::ep:
      return "ep";
    case RankGroup::etp:
      return "etp";
    case RankGroup::edp:
      return "edp";
    case RankGroup::etp_ep:
      return "etp-ep";
    case RankGroup::etp_ep_pp:
      return "etp-ep-pp";
    case RankGroup::embedding:
      return "embedding";
    case RankGroup::kv_replicas:
      return "kv-replicas";
    case RankGroup::dp_cp_within_instance:
      return "dp-cp-within-instance";
    case RankGroup::dp_cp_across_instances:
      return "dp-cp-across-instances";
    case RankGroup::edp_within_instance:
      return "edp-within-instance";
    case RankGroup::edp_across_instances:
      return "edp-across-instances";
    case RankGroup::optimizer_instance:
      return "optimizer-instance";
  }
  return "?";
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
