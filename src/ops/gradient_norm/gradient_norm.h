// Gradient norm and clipping, in operations between which the squares can be summed over ranks:
//   squared_norms      sums the squares of each gradient, in double, in a fixed order;
//   squared_norm_sum   their sum, in order, where ranks hold different parts of the model;
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

// Inputs: the gradients. Output: f64 [n]. No attributes.
extern const OpSpec kSquaredNorms;

// The sum of f64 [n] as a metric f64 [1], which can be summed over ranks in place.
ValueId squared_norm_sum(Builder& builder, ValueId squared_norms, const std::string& name);

// Inputs: squared norms. Output: f64 [1]. No attributes.
extern const OpSpec kSquaredNormSum;

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
