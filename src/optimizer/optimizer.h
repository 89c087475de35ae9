// Optimizers: what one keeps of each parameter, and the operations that update it. The step, the
// checkpoints and the plan know no optimizer; they carry the tensors that it declares.
//
// An optimizer is made once for a run and does not change; any thread may use it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"
#include "ops/exchange/slices/slices.h"
#include "program/builder.h"
#include "program/rank_group.h"
#include "program/value.h"

namespace troupe {

// A tensor of an optimizer's state of one parameter.
struct OptimizerTensor {
  std::string name;  // "exp_avg"
  StateId values;    // of the shape of what the rank updates
  StateId scales;    // only of f8e4m3: of its blocks (ops/optimizer/adamw/moment_blocks.h)
};

// A parameter as a rank updates it.
struct OptimizedParameter {
  DType dtype = DType::f32;
  Shape whole_shape;                  // in the whole model
  Shape kept;                         // of the part that this rank updates
  bool is_hidden_matrix = false;      // of a layer, or one for each expert
  std::vector<int64_t> row_matrices;  // rows of what are several matrices; empty: it is one
  // Its matrices are cut over the ranks of a group, and this rank has their slice (all_gather, and
  // ops/exchange/slices). With one rank they are whole.
  RankGroup cut_group = RankGroup::tp;
  SliceCut cut;
};

// Adds a tensor of the state; its name is `prefix` and then the parameter's.
using AddOptimizerState =
    std::function<StateId(const std::string& prefix, DType dtype, const Shape& shape)>;

// One parameter's values of a program. Master weights are there exactly where the parameter is
// bf16 or f16: they are then what is updated, and the parameter may not be there at all.
struct ParameterUpdate {
  OptimizedParameter what;
  ValueId parameter;
  ValueId gradient;
  ValueId master;
  std::span<const OptimizerTensor> tensors;
  int64_t first = 0;  // the element of the parameter with which the tensors begin
  bool decay = true;  // weight decay applies
  std::string name;
};

struct UpdateScalars {
  ValueId learning_rate;  // f64 [1]
  ValueId weight_decay;   // f64 [1]
  ValueId number;         // i64 [1]: of this update, from 1
  ValueId coefficient;    // f64 [1]: of clipping (ops/optimizer/gradient_norm)
  ValueId skip;           // i32 [1]: not 0: nothing changes
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // The tensors of the parameter, all of them 0 at the start.
  virtual std::vector<OptimizerTensor> declare(const OptimizedParameter& parameter,
                                               const AddOptimizerState& add) const = 0;
  // How long the update of a parameter takes that needs all of it at once, compared with others; 0:
  // its rows are updated by themselves. `whole_shape` and `is_hidden_matrix` are known.
  virtual double cost_of_whole(const OptimizedParameter& /*parameter*/) const { return 0; }
  virtual void emit_update(Builder& builder, const ParameterUpdate& update,
                           const UpdateScalars& scalars) const = 0;
};

// AdamW with its usual options.
std::shared_ptr<const Optimizer> default_optimizer();

}  // namespace troupe
