#include "base/processor.h"

namespace troupe {
namespace {

constexpr const char* kSets[] = {"popcnt", "sse4.2",  "avx",      "avx2",     "bmi2",
                                 "fma",    "avx512f", "avx512bw", "avx512dq", "avx512vl"};

}  // namespace

Instructions processor_instructions() {
  Instructions present = 0;
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has[] = {
      __builtin_cpu_supports("popcnt") != 0,   __builtin_cpu_supports("sse4.2") != 0,
      __builtin_cpu_supports("avx") != 0,      __builtin_cpu_supports("avx2") != 0,
      __builtin_cpu_supports("bmi2") != 0,     __builtin_cpu_supports("fma") != 0,
      __builtin_cpu_supports("avx512f") != 0,  __builtin_cpu_supports("avx512bw") != 0,
      __builtin_cpu_supports("avx512dq") != 0, __builtin_cpu_supports("avx512vl") != 0,
  };
  static_assert(sizeof(has) / sizeof(has[0]) == sizeof(kSets) / sizeof(kSets[0]));
  for (size_t i = 0; i < sizeof(has) / sizeof(has[0]); ++i) {
    if (has[i]) present |= 1U << i;
  }
#endif
  return present;
}

bool name_missing_instructions(Instructions needed, Instructions present, char* names,
                               size_t size) {
  size_t length = 0;
  const auto append = [&](char c) {
    if (length + 1 < size) names[length++] = c;
  };
  const Instructions missing = needed & ~present;
  for (size_t i = 0; i < sizeof(kSets) / sizeof(kSets[0]); ++i) {
    if ((missing >> i & 1U) == 0) continue;
    if (length > 0) append(' ');
    for (const char* c = kSets[i]; *c != '\0'; ++c) append(*c);
  }
  if (size > 0) names[length] = '\0';
  return missing != 0;
}

}  // namespace troupe
