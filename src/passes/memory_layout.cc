#include "passes/memory_layout.h"

namespace troupe {

StateLayout::StateLayout(const StateTable& state) {
  offset.resize(static_cast<size_t>(state.size()));
  for (const bool gradients : {false, true}) {
    if (gradients) lasting_bytes = bytes;
    for (int32_t i = 0; i < state.size(); ++i) {
      const StateTensor& tensor = state[StateId{i}];
      if ((tensor.role == Role::gradient) != gradients) continue;
      const uint64_t size = MemoryPlan::aligned(tensor.bytes());
      uint64_t& arena = tensor.on_host ? host_bytes : bytes;
      offset[static_cast<size_t>(i)] = arena;
      arena += size;
      auto& by_role = tensor.on_host ? host_bytes_by_role : bytes_by_role;
      by_role[static_cast<size_t>(tensor.role)] += size;
    }
  }
}

IdVector<ValueId, Bytes> bytes_of_values(const Program& program, const MemoryPlan& plan) {
  const StateLayout state(program.state());
  const uint64_t host_state = plan.state_bytes + plan.persistent_bytes + plan.transient_bytes;
  const uint64_t host_transient = host_state + plan.host_state_bytes;
  IdVector<ValueId, Bytes> bytes(program.value_count());
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    uint64_t begin = 0;
    if (is_state(value.role)) {
      begin = state.offset[static_cast<size_t>(value.state.index)];
      if (program.state()[value.state].on_host) begin += host_state;
    } else {
      begin = plan.offset[static_cast<size_t>(i)] + plan.state_bytes;
      if (!is_persistent(value.role)) begin += plan.persistent_bytes;
      if (is_on_host(value.role)) begin = plan.offset[static_cast<size_t>(i)] + host_transient;
    }
    bytes[ValueId{i}] = {begin, begin + value.bytes()};
  }
  return bytes;
}

}  // namespace troupe
