// Processor levels of the CPU kernels. A build for several levels (TROUPE_ARCH,
// cmake/TroupeRooms.cmake) holds every CPU kernel compiled once for each; all else is compiled for
// the lowest. Which of them run is chosen once, at start: that gives the bits of the chosen level
// on every processor that has it.
//
// A build for one processor has one level, named as -march takes it ("native"; "any" where nothing
// was asked for).
#pragma once

#include <span>
#include <string_view>

namespace troupe {

// Ascending, e.g. x86-64-v2, x86-64-v3, x86-64-v4; at least one. Any thread.
std::span<const std::string_view> kernel_levels();

// Has this processor all instructions of the level? The lowest is taken for granted
// (cli/processor_check.cc). Any thread.
bool processor_has(std::string_view level);

// That the kernels run at: the lowest until one was chosen. Any thread.
std::string_view kernel_level();

// Takes effect for every kernel called from now on, so no other thread may run any. Empty: the
// highest that this processor has. Throws a bad request for a level that the build or the processor
// does not have.
void choose_kernel_level(std::string_view level);

}  // namespace troupe
