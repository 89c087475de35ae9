// The verifier: checks that a program is well formed, before anything runs.
//
// verify_program aborts (TROUPE_CHECK) with the offending operation when an invariant is broken; a
// broken program is always our own mistake. It runs on every program before it is
// planned. It reads only; any thread.
#pragma once

#include "program/program.h"

namespace troupe {

// - every value is defined before it is used, and defined once (state, inputs and metrics may be
//   written again, in place);
// - running the shape rule again gives the dtypes and shapes that the outputs have;
// - in-place outputs are mutable values; row counters are i32 tensors with that element.
void verify_program(const Program& program);

}  // namespace troupe
