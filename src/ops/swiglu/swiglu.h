// SwiGLU activation (Shazeer, "GLU variants improve transformer", 2020), optionally times the
// router's weight of the row:
//
//   y[r, i] = silu(g[r, i]) u[r, i] p[r],   silu(g) = g / (1 + e^-g)
//
// where a row of gate_up holds g (f elements) and then u (f elements). p[r] = weights[row_slot[r]]
// in flat order (slot t * k + s is token t's s-th choice), or 1 without weights. It is applied
// before the only rounding. A row_slot outside the weights gives p = 0.
//
// With a = silu(g) u in the accumulation type:
//   dg = dy p u sigma(g) (1 + g (1 - sigma(g))),  du = dy p silu(g),
//   d_weights[row_slot[r]] = sum over i of a[r, i] dy[r, i]; slots without a row get 0.
//
// Kinds (R rows, ragged when gate_up is)
//   swiglu (gate_up [R, 2 f], weights [T, k] in the accumulation dtype optional,
//           row_slot i32 [R] with weights)                     -> y [R, f]
//   swiglu_gradient (gate_up, dy [R, f], weights, row_slot)    -> d_gate_up [R, 2 f], which may be
//           stored over gate_up, and with weights d_weights [T, k] in the accumulation dtype
// Each live row has a slot of its own.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Emits the activation; `weights` and `row_slot` are both valid or both absent.
ValueId swiglu(Builder& builder, ValueId gate_up, ValueId weights, ValueId row_slot,
               const std::string& name);

extern const OpSpec kSwiglu;
extern const OpSpec kSwigluGradient;

}  // namespace troupe
