// The main gradient that a backward pass leaves for one parameter: for operations with weight
// gradients, which samples exercise only without state.
#pragma once

#include <functional>
#include <vector>

#include "program/op_sample.h"

namespace troupe::testing {

// Builds a forward pass in f64 that uses one parameter of the given values as often as `build`
// likes, differentiates it, and runs it with two threads. The main gradient holds NaN before, so
// the first use in the backward pass must overwrite it. Element j of every result (see
// SampleBuilder::result) has the gradient j + 1.
std::vector<double> main_gradient(
    const Shape& shape, const std::vector<double>& parameter,
    const std::function<void(SampleBuilder&, ValueId parameter)>& build);

}  // namespace troupe::testing
