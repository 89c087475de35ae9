// Parameters of a rank's state by their names, for tests.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "model/model_state.h"

namespace troupe::testing {

// nullptr when the rank has no such parameter. `layer` -1: outside the layers.
inline const Parameter* search_parameter(const ModelState& state, std::string_view name,
                                         int32_t layer = -1) {
  for (const Parameter& parameter : state.parameters) {
    if (parameter.layer == layer && parameter.name == name) return &parameter;
  }
  return nullptr;
}

// Aborts when the rank has no such parameter.
inline const Parameter& get_parameter(const ModelState& state, std::string_view name,
                                      int32_t layer = -1) {
  const Parameter* parameter = search_parameter(state, name, layer);
  TROUPE_CHECK(parameter != nullptr, "the rank has this parameter");
  return *parameter;
}

}  // namespace troupe::testing
