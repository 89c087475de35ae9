// The state of a model: which parameters it has, their main gradients and optimizer states, and how
// each parameter starts.
//
// Parameters are told apart by (kind, layer). `number` is the parameter's place in the whole model;
// with the element's index it keys the random initial weights, so they do not depend on how the
// model is spread over ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/shape.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "model/parameter_slice.h"
#include "program/shard.h"
#include "program/value.h"

namespace troupe {

struct Parameter {
  ParameterKind kind;
  int32_t layer = -1;
  uint32_t number = 0;   // in the whole model, which all ranks count alike
  Shape whole_shape;     // in the whole model
  ParameterSlice slice;  // what this rank holds of it
  // Elements of the slice: what this rank keeps the optimizer state of, and updates. All of them
  // unless state is sharded.
  IndexRange shard;
  // Elements of the slice that `value` and `gradient` have: all, or with sharded parameters
  // `shard`.
  IndexRange held;
  StateId value;
  StateId gradient;  // invalid when the model is not trained
  // AdamW moments and fp32 master weights, of the shard (shape_of_shard). Invalid when the model is
  // not trained, or the shard is empty.
  StateId exp_avg;
  StateId exp_avg_sq;
  // Of moments in f8e4m3: the scales of their blocks.
  StateId exp_avg_scale;
  StateId exp_avg_sq_scale;
  StateId master;  // only when `value` is bf16
  // How the elements start: normal with deviation `init_std`, or uniform between -init_bound and
  // init_bound; where both are 0 all are `init_constant`.
  double init_std = 0;
  double init_bound = 0;
  double init_constant = 0;
  bool decay = true;  // weight decay applies (not to norms and biases)
};

struct ModelState {
  ModelPart part;
  DType dtype = DType::f32;  // as declared: that of all weights but those of norms
  bool trained = false;      // there are gradients and optimizer state
  std::shared_ptr<const StateTable> table;
  std::vector<Parameter> parameters;   // those that the rank holds, by number
  std::vector<StateId> expert_biases;  // f32 [experts], by layer; invalid where a layer has none,
                                       // or the rank has not the layer

  // nullptr when the rank has no such parameter.
  const Parameter* search(ParameterKind kind, int32_t layer = -1) const;
  // Aborts when the rank has no such parameter.
  const Parameter& get(ParameterKind kind, int32_t layer = -1) const;
  // Invalid when the rank has no such parameter.
  StateId find(ParameterKind kind, int32_t layer = -1) const;
};

// Declares the state of a rank's part of the model. `dtype` is that of the weights, except those of
// norms, which have its accumulation type, as master weights do, and gradients and moments unless
// part.run says otherwise. `trained` adds gradients and optimizer state. Expert biases are router
// state, fp32 in every model: the step moves them, the optimizer does not. Refuses what
// check_layout refuses of the model.
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
