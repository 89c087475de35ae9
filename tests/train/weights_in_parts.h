// Compares weights that are read in parts with those of the whole model.
#pragma once

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include "model/parameters.h"
#include "runtime/state_storage.h"
#include "train/loaded_model.h"

namespace troupe {

// Of a state in `dtype`.
inline void expect_same_in_parts(const SavedModel& model, DType dtype) {
  const ModelState state = declare_model_state(model.config, dtype, /*trained=*/false);
  const StateStorage whole(state.table);
  load_saved_model(model, state, whole);
  const ElementReader read = element_reader(model, state);
  for (int32_t i = 0; i < state.table->size(); ++i) {
    const TensorView view = whole.view(StateId{i});
    const int64_t elements = view.shape.elements();
    const bool is_bias = std::find(state.expert_biases.begin(), state.expert_biases.end(),
                                   StateId{i}) != state.expert_biases.end();
    std::vector<IndexRange> ranges = {{0, elements}};
    if (!is_bias) {  // these are read as a whole
      ranges.insert(ranges.end(), {{elements / 3, elements / 3 * 2 + 1}, {elements - 1, elements}});
    }
    for (const IndexRange& range : ranges) {
      const size_t size = size_of(view.dtype);
      EXPECT_EQ(std::memcmp(read(StateId{i}, range),
                            static_cast<const std::byte*>(view.data) +
                                static_cast<size_t>(range.begin) * size,
                            static_cast<size_t>(range.end - range.begin) * size),
                0)
          << model.path << ": " << (*state.table)[StateId{i}].name << " from " << range.begin;
    }
  }
}

}  // namespace troupe
