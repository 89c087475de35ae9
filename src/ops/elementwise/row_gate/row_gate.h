// A sigmoid gate for each row, as on the output of gated shared experts (Qwen2-MoE;
// docs/routing.md, "Shared experts"):
//
//   y[t, i] = sigma(g[t]) x[t, i],   sigma(g) = 1 / (1 + e^-g)
//
// computed in the accumulation type and rounded once. No tensor of this room is ragged.
//
//   dx[t, i] = dy[t, i] sigma(g[t])
//   dg[t] = sigma(g[t]) (1 - sigma(g[t])) times the sum over i of x[t, i] dy[t, i]
//
// Kinds
//   row_gate          (x [T, h], g [T, 1])     -> y [T, h] in x's dtype, which may be stored over x
//   row_gate_gradient (x, dy [T, h], g)        -> dx [T, h], which may be stored over dy, and
//                                                 dg [T, 1] in g's dtype
// g has the dtype of x or its accumulation dtype.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Emits the gating of the rows of `x` [T, h] by `gate` [T, 1] and returns y [T, h].
ValueId row_gate(Builder& builder, ValueId x, ValueId gate, const std::string& name);

extern const OpSpec kRowGate;
extern const OpSpec kRowGateGradient;

}  // namespace troupe
