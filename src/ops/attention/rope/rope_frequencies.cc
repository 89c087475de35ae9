#include "ops/attention/rope/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace troupe {
namespace {

// Of a pair with the plain frequency `plain`: how much of it stays, from 0 (all is divided) to 1.
double kept_of_llama3(double plain, const RopeScaling& scaling) {
  const double turns = scaling.original_positions * plain / (2 * std::numbers::pi);
  return std::clamp((turns - scaling.slow) / (scaling.fast - scaling.slow), 0.0, 1.0);
}

// The pairs between which yarn goes over from frequencies that stay to those that are divided.
struct PairRange {
  double first;
  double last;
};
PairRange yarn_range(int32_t rotary_dim, double base, const RopeScaling& scaling) {
  const auto pair_of_turns = [&](double turns) {
    return rotary_dim * std::log(scaling.original_positions / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(base));
  };
  PairRange range{pair_of_turns(scaling.fast), pair_of_turns(scaling.slow)};
  if (scaling.round_range) range = {std::floor(range.first), std::ceil(range.last)};
  range.first = std::max(range.first, 0.0);
  range.last = std::min(range.last, rotary_dim - 1.0);
  if (range.first == range.last) range.last += 0.001;
  return range;
}

}  // namespace

std::string_view name_of(RopeScalingKind kind) {
  switch (kind) {
    case RopeScalingKind::none:
      return "default";
    case RopeScalingKind::linear:
      return "linear";
    case RopeScalingKind::llama3:
      return "llama3";
    case RopeScalingKind::yarn:
      return "yarn";
  }
  return "?";
}

double rope_frequency(int64_t pair, int32_t rotary_dim, double base, const RopeScaling& scaling) {
  const auto i = static_cast<double>(pair);
  const double plain = std::pow(base, -2.0 * i / rotary_dim);
  double kept = 1;
  switch (scaling.kind) {
    case RopeScalingKind::none:
      break;
    case RopeScalingKind::linear:
      kept = 0;
      break;
    case RopeScalingKind::llama3:
      kept = kept_of_llama3(plain, scaling);
      break;
    case RopeScalingKind::yarn: {
      const PairRange range = yarn_range(rotary_dim, base, scaling);
      kept = 1 - std::clamp((i - range.first) / (range.last - range.first), 0.0, 1.0);
      break;
    }
  }
  return kept * plain + (1 - kept) * plain / scaling.factor;
}

}  // namespace troupe
