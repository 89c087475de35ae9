// Visits the elements of a rank's slice of a parameter, one by one.
#pragma once

#include "model/parameters.h"

namespace troupe::testing {

// Calls visit(element of the slice, element of the whole tensor) for all of the slice.
template <class Visit>
void for_each_element(const Parameter& parameter, const Visit& visit) {
  for (const SliceRun& run : runs_of(parameter.slice, parameter.whole_shape)) {
    for (int64_t i = 0; i < run.elements; ++i) visit(run.own + i, run.whole + i);
  }
}

}  // namespace troupe::testing
