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

}  // namespace troupe
