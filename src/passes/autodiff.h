// Autodiff: appends the backward operations of a stretch of forward operations to the program.
//
// Contract: walks the stretch backwards, once; asks each operation's own derivative rule to emit
// its gradient operations; sums gradients of values that are used several times, in the order in
// which the walk meets them. Forward operations are not changed. Weight gradients go to the main
// gradients of the StateTable: the first one of the step stores, later ones accumulate.
//
// Operations whose results are not to be kept for the backward pass are run again where it first
// reads one of them: clones with phase recompute, which give the same bits.
#pragma once

#include <span>
#include <vector>

#include "program/builder.h"

namespace troupe {

// A value at which differentiation starts, and the gradient that enters there.
struct GradientSeed {
  ValueId value;
  ValueId gradient;
};

// Which main gradients have been stored so far in this step; shared by all its micro-batches.
struct MainGradients {
  explicit MainGradients(const StateTable& state)
      : written(static_cast<size_t>(state.size()), false) {}
  std::vector<bool> written;  // by StateId of the gradient
};

// Differentiates operations [first, last). `repeated` are those that are run again; they change
// nothing in place. `differentiable_inputs` are values (besides parameters)
// whose gradients are wanted too. Returns the gradient of every value, by ValueId of the values
// that existed before the call; invalid where there is none (parameters: see MainGradients).
std::vector<ValueId> append_backward(Builder& builder, int32_t first, int32_t last,
                                     std::span<const GradientSeed> seeds,
                                     std::span<const ValueId> differentiable_inputs,
                                     MainGradients& main_gradients,
                                     std::span<const int32_t> repeated = {});

}  // namespace troupe
