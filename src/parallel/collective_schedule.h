// The collectives of a program in order, and the check that all ranks' programs agree on them: a
// schedule in which ranks would wait for each other for ever does not start.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "program/program.h"

namespace troupe {

// Checks, for every group, that all programs run the same collectives in the same order: kinds,
// dtypes and shapes. programs[r] is that of rank r, all of them members of every group. The first
// difference is a UserError (does_not_fit: the plan is refused) that names both ranks' operations.
void verify_collectives(std::span<const Program* const> programs);

// Equal for programs that verify_collectives() finds to agree, and otherwise practically never.
uint64_t hash_collectives(const Program& program);

}  // namespace troupe
