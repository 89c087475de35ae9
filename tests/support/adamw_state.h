// What AdamW keeps of a parameter, for tests that look at it.
#pragma once

#include "model/model_state.h"
#include "optimizer/adamw_optimizer.h"

namespace troupe::testing {

// Moments of a parameter; without ids where the rank has none.
inline OptimizerTensor exp_avg_of(const Parameter& parameter) {
  return parameter.optimizer.empty() ? OptimizerTensor{} : parameter.optimizer.at(0);
}
inline OptimizerTensor exp_avg_sq_of(const Parameter& parameter) {
  return parameter.optimizer.empty() ? OptimizerTensor{} : parameter.optimizer.at(1);
}

// AdamW whose moments have these types.
inline std::shared_ptr<const Optimizer> adamw_of(DType exp_avg, DType exp_avg_sq) {
  return std::make_shared<const AdamWOptimizer>(
      AdamWOptions{.exp_avg = exp_avg, .exp_avg_sq = exp_avg_sq});
}

}  // namespace troupe::testing
