#include "model/model_state.h"

#include <algorithm>

#include "base/error.h"

namespace troupe {

const Parameter* ModelState::search(ParameterId id) const {
  const auto found = std::lower_bound(
      parameters.begin(), parameters.end(), id.index,
      [](const Parameter& parameter, int32_t index) { return parameter.id.index < index; });
  return found != parameters.end() && found->id == id ? &*found : nullptr;
}

const Parameter& ModelState::get(ParameterId id) const {
  const Parameter* parameter = search(id);
  TROUPE_CHECK(parameter != nullptr, "the rank has this parameter");
  return *parameter;
}

}  // namespace troupe
