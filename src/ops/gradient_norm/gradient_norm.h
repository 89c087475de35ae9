// Gradient norm and clipping, in two operations so that the squares can be summed over ranks
// between them:
//   squared_norms      sums the squares of each gradient, in double, in a fixed order;
//   clip_coefficient   norm = sqrt(sum of all squares)
//                      coefficient = min(1, max_norm / (norm + 1e-6))
//                      skip = 1 when the norm is not finite.
// The optimizer multiplies gradients by the coefficient and does nothing when skip is set; both
// stay on the device. Neither has a derivative. (Formula: torch.nn.utils.clip_grad_norm_, Megatron
// Core.)
#pragma once

#include <span>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `gradients`: n >= 1 tensors of any shape, each f32 or f64, not ragged. Returns f64 [n].
ValueId squared_norms(Builder& builder, std::span<const ValueId> gradients,
                      const std::string& name);

// The sum of the squares of all of them, f64 [1], to be summed over ranks; n may be 0, for ranks
// that count none.
ValueId sum_of_squared_norms(Builder& builder, std::span<const ValueId> gradients,
                             const std::string& name);

struct SquaredNormsAttributes {
  bool summed = false;
};

// Inputs: the gradients. Output: f64 [n], or [1] when they are summed.
extern const OpSpec kSquaredNorms;

struct ClipAttributes {
  double max_norm = 0;  // 0 or less: gradients are not clipped
};

struct ClipResult {
  ValueId norm;         // f64 [1], a metric: the norm before clipping
  ValueId coefficient;  // f64 [1]; 1 when the norm is not finite
  ValueId skip;         // i32 [1], a metric
};

// `squared_norms`: f64 [n]. Results are named `name`, name.coefficient and name.skip.
ClipResult clip_coefficient(Builder& builder, ValueId squared_norms,
                            const ClipAttributes& attributes, const std::string& name);

// Inputs: squared norms. Outputs: norm, coefficient, skip.
extern const OpSpec kClipCoefficient;

}  // namespace troupe
