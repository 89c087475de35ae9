#include "program/program.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "program/communicator.h"

namespace troupe {
namespace {

constexpr auto kPhaseNames =
    std::to_array<std::string_view>({"forward", "dgrad", "wgrad", "recompute", "optimizer"});
constexpr auto kQueueNames = std::to_array<std::string_view>(
    {"compute", "copy", "comm", "tokens", "network", "pipe", "replica"});
static_assert(kQueueNames.size() == kQueueCount);
constexpr auto kGroupNames = std::to_array<std::string_view>({"world",
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
                                                              "optimizer-instance"});
static_assert(kGroupNames.size() == kRankGroupCount);

}  // namespace

std::string_view name_of(Phase phase) {
  return kPhaseNames[static_cast<size_t>(phase)];
}
std::string_view name_of(Queue queue) {
  return kQueueNames[static_cast<size_t>(queue)];
}
std::string_view name_of(RankGroup group) {
  return kGroupNames[static_cast<size_t>(group)];
}

Queue queue_of(RankGroup group) {
  if (group == RankGroup::etp_ep_across_nodes) return Queue::network;
  if (group == RankGroup::ep || exchanges_tokens(group)) return Queue::tokens;
  if (group == RankGroup::pp) return Queue::pipeline;
  const bool of_replicas =
      group == RankGroup::dp_cp || group == RankGroup::edp ||
      (group >= RankGroup::dp_cp_within_instance && group <= RankGroup::edp_across_instances);
  return of_replicas ? Queue::replicas : Queue::communication;
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
