// Which instructions the compiler was allowed to use, and which the processor has, so that a
// program on a processor that is too old says so instead of dying of an illegal instruction.
//
// What is declared here runs before main() and on any processor of the architecture: it is compiled
// for the oldest (CMakeLists.txt) and calls nothing that is not. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace troupe {

// Instruction sets that the compiler uses by itself, a bit each; others come with one of them.
using Instructions = uint32_t;

// Those that this program's code may use; a constant, there before anything runs.
extern const Instructions kNeededInstructions;

// Those of this processor and its operating system.
Instructions processor_instructions();

// The names of the sets in `needed` that are not in `present`, separated by blanks, as a C string
// in `names`, which has room for `size` bytes; cut off where it has not. False: none is missing.
bool name_missing_instructions(Instructions needed, Instructions present, char* names, size_t size);

}  // namespace troupe
