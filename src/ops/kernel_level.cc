#include "ops/kernel_level.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <iterator>
#include <string>

#include "base/build_info.h"
#include "base/error.h"
#include "base/text.h"

#ifdef TROUPE_KERNEL_LEVELS
// Written by cmake/link_kernel_levels.sh: the addresses that calls of kernels go through, and those
// of each level's functions, level after level in the same order.
extern "C" {
extern const uint64_t troupe_kernel_count;
extern void* troupe_kernel_slots[];
extern void* const troupe_kernel_functions[];
}
#endif

namespace troupe {
namespace {

#ifdef TROUPE_KERNEL_LEVELS
constexpr std::string_view kKernelLevels[] = {TROUPE_KERNEL_LEVELS};

void call_kernels_of(size_t level) {
  std::copy_n(troupe_kernel_functions + level * troupe_kernel_count, troupe_kernel_count,
              troupe_kernel_slots);
}
#else
const std::string_view kKernelLevels[] = {build_processor().empty() ? "any" : build_processor()};

void call_kernels_of(size_t) {}
#endif

size_t chosen_level = 0;

size_t highest_level() {
  size_t level = std::size(kKernelLevels) - 1;
  while (level > 0 && !processor_has(kKernelLevels[level])) --level;
  return level;
}

size_t checked_level(std::string_view name) {
  const auto* const found = std::find(std::begin(kKernelLevels), std::end(kKernelLevels), name);
  if (found == std::end(kKernelLevels)) {
    throw_bad_request(
        fmt::format("There are no CPU kernels for {} in this program: it has them "
                    "for {}.",
                    printable(std::string(name)), fmt::join(kKernelLevels, ", ")));
  }
  if (!processor_has(name)) {
    throw_bad_request(
        fmt::format("This processor cannot run the CPU kernels for {}: the highest "
                    "level that it has is {}.",
                    name, kKernelLevels[highest_level()]));
  }
  return static_cast<size_t>(found - kKernelLevels);
}

}  // namespace

std::span<const std::string_view> kernel_levels() {
  return kKernelLevels;
}

bool processor_has(std::string_view level) {
#ifdef __x86_64__
  __builtin_cpu_init();
  // What the levels add comes with these in every processor; clang 14 does not know levels' names.
  const bool v3 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi2") != 0 &&
                  __builtin_cpu_supports("fma") != 0;
  if (level == "x86-64-v3") return v3;
  if (level == "x86-64-v4") {
    return v3 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
#endif
  return level == kKernelLevels[0];
}

std::string_view kernel_level() {
  return kKernelLevels[chosen_level];
}

void choose_kernel_level(std::string_view level) {
  chosen_level = level.empty() ? highest_level() : checked_level(level);
  call_kernels_of(chosen_level);
}

}  // namespace troupe
