// Declares the state of a model on a rank (model_state.h), and says how each parameter starts: with
// the element's index its number keys the random initial weights, so that they do not depend on how
// the model is spread over ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "model/model.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "model/model_state.h"

namespace troupe {

// With the parameter's name the name of its master weights.
inline constexpr const char* kMasterPrefix = "master.";

// Declares the state of a rank's part of the model. `dtype` is that of the weights, except those of
// norms, which have its accumulation type, as master weights do, and gradients and moments unless
// part.run says otherwise. `trained` adds gradients and optimizer state. A layout that
// check_layout() passes.
ModelState declare_model_state(std::shared_ptr<const Model> model, DType dtype, bool trained,
                               const ModelPart& part);

// The same of the model of a configuration.
ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained,
                               const ModelPart& part);

// Of the whole model, on one rank.
ModelState declare_model_state(const ModelConfig& config, DType dtype, bool trained);

// The initial value of one element, by its number in the whole tensor: a pure function of its
// arguments.
double initial_value(const Parameter& parameter, uint64_t seed, int64_t element);

// values[i] = initial_value(parameter, seed, first + i) for `count` elements, in a fraction of the
// time.
void fill_initial_values(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                         double* values);

}  // namespace troupe
