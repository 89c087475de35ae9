// Muon (Jordan and others, 2024; the form of Megatron Core): hidden matrices move by their
// momentum, orthogonalised (ops/newton_schulz, ops/muon); embedding, head, norms and biases by
// AdamW. Each expert's matrix is one by itself.
//
// Matrices must be whole on the ranks that update them: no layout may cut them.
#pragma once

#include "ops/muon/muon.h"
#include "ops/newton_schulz/newton_schulz.h"
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
  bool split_rows = true;  // OptimizedParameter::row_matrices are matrices by themselves
  AdamWOptions adamw = {};
};

class MuonOptimizer : public Optimizer {
 public:
  explicit MuonOptimizer(const MuonOptions& options) : options_(options), adamw_(options.adamw) {}

  const MuonOptions& options() const { return options_; }

  std::vector<OptimizerTensor> declare(const OptimizedParameter& parameter,
                                       const AddOptimizerState& add) const override;
  void emit_update(Builder& builder, const ParameterUpdate& update,
                   const UpdateScalars& scalars) const override;

 private:
  NewtonSchulzAttributes orthogonalisation(const OptimizedParameter& parameter) const;

  const MuonOptions options_;
  const AdamWOptimizer adamw_;
};

}  // namespace troupe
