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

const Parameter* ModelState::search(std::string_view name, int32_t layer) const {
  for (const Parameter& parameter : parameters) {
    if (parameter.layer == layer && parameter.name == name) return &parameter;
  }
  return nullptr;
}

const Parameter& ModelState::get(ParameterId id) const {
  const Parameter* parameter = search(id);
  TROUPE_CHECK(parameter != nullptr, "the rank has this parameter");
  return *parameter;
}

const Parameter& ModelState::get(std::string_view name, int32_t layer) const {
  const Parameter* parameter = search(name, layer);
  TROUPE_CHECK(parameter != nullptr, "the rank has this parameter");
  return *parameter;
}

}  // namespace troupe
