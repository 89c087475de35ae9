// AdamW (Loshchilov and Hutter, 2019) as an optimizer: two moments of each element.
#pragma once

#include "optimizer/optimizer.h"

namespace troupe {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  // Of the moments: f32, bf16, or f8e4m3, which is that of tensors of two dimensions and more
  // (ops/optimizer/adamw/moment_blocks.h), beside which others are so small that theirs stay f32.
  // Those of f64 parameters are f64 all the same.
  DType exp_avg = DType::f32;
  DType exp_avg_sq = DType::f32;
};

class AdamWOptimizer : public Optimizer {
 public:
  explicit AdamWOptimizer(const AdamWOptions& options) : options_(options) {}

  const AdamWOptions& options() const { return options_; }

  std::vector<OptimizerTensor> declare(const OptimizedParameter& parameter,
                                       const AddOptimizerState& add) const override;
  void emit_update(Builder& builder, const ParameterUpdate& update,
                   const UpdateScalars& scalars) const override;

 private:
  const AdamWOptions options_;
};

}  // namespace troupe
