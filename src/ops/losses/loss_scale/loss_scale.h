// The loss scale of half precision: y = x * scale for the gradient x with which a loss enters the
// backward pass, so that the gradients that follow from it do not vanish in f16. The scale is a
// power of two, or any number of the user's; clip_coefficient (ops/optimizer/gradient_norm) takes
// it out again. It has no derivative. (Micikevicius et al., "Mixed precision training", 2018.)
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// `gradient`: f32 or f64 [1]; `scale`: f64 [1]. Returns what `gradient` is.
ValueId scale_gradient(Builder& builder, ValueId gradient, ValueId scale, const std::string& name);

// Inputs: gradient, scale.
extern const OpSpec kScaleGradient;

}  // namespace troupe
