// Muon (Jordan and others, 2024; the form of Megatron Core): hidden matrices move by their
// momentum, orthogonalised (ops/optimizer/newton_schulz, ops/optimizer/muon); embedding, head,
// norms and biases by AdamW. Each expert's matrix is one by itself.
//
// A matrix that is cut over ranks is gathered: each of them orthogonalises all of it, as one rank
// does, and keeps its slice. With MuonOptions::is_blockwise each orthogonalises its slice by
// itself, which is another optimizer for each number of ranks. Sharded state is that of whole
// matrices (model/parameter_owners.h).
#pragma once

#include "ops/optimizer/muon/muon.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "optimizer/adamw_optimizer.h"

namespace troupe {

struct MuonOptions {
  double beta = 0.9;  // of the momentum
  bool nesterov = false;
  MuonScale scale = MuonScale::spectral;
  double extra_scale = 1;
  NewtonSchulzCoefficients coefficients = NewtonSchulzCoefficients::quintic;
  int32_t steps = 5;
  // Of f32 momentum; f64 is orthogonalised in f64.
  NewtonSchulzArithmetic arithmetic = NewtonSchulzArithmetic::bf16;
  bool split_rows = true;     // OptimizedParameter::row_matrices are matrices by themselves
  bool is_blockwise = false;  // slices of a cut matrix are matrices by themselves
  AdamWOptions adamw = {};
};

class MuonOptimizer : public Optimizer {
 public:
  explicit MuonOptimizer(const MuonOptions& options) : options_(options), adamw_(options.adamw) {}

  const MuonOptions& options() const { return options_; }

  std::vector<OptimizerTensor> declare(const OptimizedParameter& parameter,
                                       const AddOptimizerState& add) const override;
  double cost_of_whole(const OptimizedParameter& parameter) const override;
  void emit_update(Builder& builder, const ParameterUpdate& update,
                   const UpdateScalars& scalars) const override;

 private:
  NewtonSchulzAttributes orthogonalisation(const OptimizedParameter& parameter) const;
  // Of the momentum `x` of what the rank keeps; named `name`.
  ValueId orthogonal(Builder& builder, const OptimizedParameter& parameter, ValueId x,
                     const std::string& name) const;

  const MuonOptions options_;
  const AdamWOptimizer adamw_;
};

}  // namespace troupe
