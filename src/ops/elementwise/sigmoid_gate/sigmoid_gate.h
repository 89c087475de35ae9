// A sigmoid gate for each element, as on the output of gated attention (Qwen3-Next):
//
//   y = x sigma(g),   dx = dy sigma(g),   dg = dy x sigma(g) (1 - sigma(g))
//
// in the accumulation type, rounded once.
//
// Kinds (all of one float dtype and shape [T, n], not ragged)
//   sigmoid_gate          (x, g)      -> y, which may be stored over x
//   sigmoid_gate_gradient (dy, x, g)  -> dx, which may be stored over dy, and dg
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

ValueId sigmoid_gate(Builder& builder, ValueId x, ValueId gate, const std::string& name);

extern const OpSpec kSigmoidGate;
extern const OpSpec kSigmoidGateGradient;

}  // namespace troupe
