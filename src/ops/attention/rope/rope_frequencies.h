// The angles by which rotary position embeddings turn, and how models stretch them to contexts
// longer than those that they were first trained with.
//
// Pair i < r / 2 of a head with r = rotary_dim turns by f_i radians from one position to the next.
// With b = base and the plain frequency p_i = b^(-2 i / r):
//
//   none    f_i = p_i
//   linear  f_i = p_i / factor                                  (Chen et al., 2023)
//   llama3  with w = original_positions p_i / (2 pi), the turns in the original context, and
//           s = clamp((w - slow) / (fast - slow), 0, 1):
//           f_i = s p_i + (1 - s) p_i / factor                  (Llama 3.1: slow 1, fast 4)
//   yarn    with d(n) = r ln(original_positions / (2 pi n)) / (2 ln b), the pair that makes n turns
//           in the original context, lo = max(d(fast), 0), hi = min(d(slow), r - 1), before that
//           rounded down and up where `round_range` says so, and m = clamp((i - lo) / (hi - lo), 0,
//           1), where hi = lo is taken as hi = lo + 0.001:
//           f_i = (1 - m) p_i + m p_i / factor                  (Peng et al., 2023: fast 32, slow
//           1)
//
// Cosines and sines are multiplied by `concentration`, with any kind. Plain values; any thread.
#pragma once

#include <cstdint>
#include <string_view>

namespace troupe {

enum class RopeScalingKind : uint8_t { none, linear, llama3, yarn };

// "default", "linear", "llama3", "yarn": Hugging Face's names; "?" for what is no enumerator.
std::string_view name_of(RopeScalingKind kind);

struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::none;
  bool round_range = true;         // of yarn
  int32_t original_positions = 0;  // of llama3 and yarn
  double factor = 1;
  double fast = 0;  // turns in the original context: above, frequencies stay as they are,
  double slow = 0;  // below, they are divided by the factor
  double concentration = 1;

  bool operator==(const RopeScaling&) const = default;
};

// f_i of pair i, in radians per position.
double rope_frequency(int64_t pair, int32_t rotary_dim, double base, const RopeScaling& scaling);

}  // namespace troupe
