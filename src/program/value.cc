#include "program/value.h"

#include <array>

#include "base/error.h"

namespace troupe {

std::string_view name_of(Role role) {
  static constexpr auto kNames = std::to_array<std::string_view>(
      {"parameters", "gradients", "optimizer", "router_state", "inputs", "metrics", "activations",
       "workspace", "communication", "stash", "offloaded"});
  static_assert(kNames.size() == kRoleCount);
  return kNames[static_cast<size_t>(role)];
}

StateId StateTable::add(StateTensor tensor) {
  TROUPE_CHECK(is_state(tensor.role), "not a state role: " + tensor.name);
  tensors_.push_back(std::move(tensor));
  return StateId{size() - 1};
}

}  // namespace troupe
