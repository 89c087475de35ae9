// The list of all kinds of operation: for tests, benchmarks and `troupe inspect --kinds`. Nothing
// looks an operation up by name to decide anything.
#pragma once

#include <span>

#include "program/op_spec.h"

namespace troupe {

std::span<const OpSpec* const> all_operations();

}  // namespace troupe
