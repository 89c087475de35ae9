// Which layers of a model have its sliding window, in the one form that ModelConfig has for it: a
// list only where layers differ, and no window where none has it. A pure function; any thread.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "model/model_config.h"

namespace troupe {

// `layers`: by layer, has the window of config.sliding_window.
inline void set_window_layers(std::vector<bool> layers, ModelConfig& config) {
  const auto is_one_kind = [&](bool kind) {
    return std::all_of(layers.begin(), layers.end(), [=](bool has) { return has == kind; });
  };
  if (is_one_kind(false)) config.sliding_window = 0;
  if (is_one_kind(false) || is_one_kind(true)) layers.clear();
  config.window_layers = std::move(layers);
}

}  // namespace troupe
