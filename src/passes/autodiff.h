// Autodiff: appends the backward operations of a stretch of forward operations to the program.
//
// Contract: walks the stretch backwards, once; asks each operation's own derivative rule to emit
// its gradient operations; sums gradients of values that are used several times, in the order in
// which the walk meets them. Forward operations are not changed. Weight gradients go to the main
// gradients of the StateTable: the first one of the step stores, later ones accumulate.
#pragma once

#include <span>
#include <vector>

#include "base/id_vector.h"
#include "program/builder.h"

namespace troupe {

// A value at which differentiation starts, and the gradient that enters there.
struct GradientSeed {
  ValueId value;
  ValueId gradient;
};

// Which main gradients have been stored so far in this step; shared by all its micro-batches.
struct MainGradients {
  explicit MainGradients(const StateTable& state) : written(state.size(), false) {}
  IdVector<StateId, bool> written;  // by the gradient
};

// Differentiates operations [first, last). `differentiable_inputs` are values (besides parameters)
// whose gradients are needed too. Returns the gradient of every value that existed before the call;
// invalid where there is none (parameters: see MainGradients).
IdVector<ValueId, ValueId> append_backward(Builder& builder, int32_t first, int32_t last,
                                           std::span<const GradientSeed> seeds,
                                           std::span<const ValueId> differentiable_inputs,
                                           MainGradients& main_gradients);

}  // namespace troupe
