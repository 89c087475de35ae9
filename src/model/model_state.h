// The state of one rank's part of a model: the parameters that it holds, their main gradients and
// optimizer states, and the state of routers. Declared by parameters.h; storage is the runtime's.
//
// Plain values; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/model_part.h"
#include "model/parameter_slice.h"
#include "model/parameter_spec.h"
#include "program/shard.h"
#include "program/value.h"

namespace troupe {

class Model;

// A parameter of the model as this rank holds it.
struct Parameter : ParameterSpec {
  Parameter() = default;
  explicit Parameter(const ParameterSpec& spec) : ParameterSpec(spec) {}

  ParameterSlice slice;  // what this rank holds of it
  // Elements of the slice: what this rank keeps the optimizer state of, and updates. All of them
  // unless state is sharded.
  IndexRange shard;
  // Of the ranks among which the optimizer's state is sharded the place of the one whose shard has
  // the whole slice; -1: all have some rows.
  int32_t owner = -1;
  // Elements of the slice that `value` and `gradient` have: all, or with sharded parameters
  // `shard`.
  IndexRange held;
  StateId value;
  StateId gradient;  // invalid when the model is not trained
  // What the optimizer keeps, and fp32 master weights, of the shard (shape_of_shard). There is
  // nothing of it when the model is not trained, or the shard is empty.
  std::vector<OptimizerTensor> optimizer;
  OptimizedParameter optimized;  // as the optimizer sees it
  StateId master;                // only when `value` is bf16 or f16
  // Ranks read codes of it alone (RunLayout::weight_codes). With masters, `value` is not stored.
  bool is_in_codes = false;
  // f32 [experts of this rank, or 1; 3; steps], where the run keeps histories of largest elements
  // and the parameter is a matrix of a layer; of the products in 8 bits alone it becomes more than
  // zeros.
  StateId amax_history;

  // Does this rank update some of it?
  bool is_updated() const { return gradient.valid() && shard.end > shard.begin; }
};

struct ModelState {
  std::shared_ptr<const Model> model;
  ModelPart part;
  DType dtype = DType::f32;  // as declared: that of all weights but those of norms
  bool trained = false;      // there are gradients and optimizer state
  std::shared_ptr<const StateTable> table;
  std::vector<Parameter> parameters;   // those that the rank holds, by number
  std::vector<StateId> expert_biases;  // f32 [experts], by layer; invalid where a layer has none,
                                       // or the rank has not the layer

  // nullptr when the rank has no such parameter.
  const Parameter* search(ParameterId id) const;
  // Aborts when the rank has no such parameter.
  const Parameter& get(ParameterId id) const;
};

}  // namespace troupe
