#include "program/value.h"

#include "base/error.h"

namespace troupe {

std::string_view name_of(Role role) {
  switch (role) {
    case Role::parameter:
      return "parameters";
    case Role::gradient:
      return "gradients";
    case Role::optimizer:
      return "optimizer";
    case Role::router_state:
      return "router_state";
    case Role::input:
      return "inputs";
    case Role::metric:
      return "metrics";
    case Role::activation:
      return "activations";
    case Role::workspace:
      return "workspace";
    case Role::communication:
      return "communication";
    case Role::offloaded:
      return "offloaded";
  }
  return "?";
}

StateId StateTable::add(StateTensor tensor) {
  TROUPE_CHECK(is_state(tensor.role), "not a state role: " + tensor.name);
  tensors_.push_back(std::move(tensor));
  return StateId{size() - 1};
}

}  // namespace troupe
