#include "train/gradient_watch.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace troupe {

std::string GradientWatch::look(int64_t step, double grad_norm) {
  if (!std::isfinite(grad_norm)) return {};
  if (samples_ < kSamples) {
    ++samples_;
    largest_ = std::max(largest_, grad_norm);
    return {};
  }
  if (grad_norm < kFactor * largest_) return {};
  return fmt::format(
      "Warning: step {}: the norm of the gradients is {:.3g}. The largest of the first {} steps of "
      "this run was {:.3g} (--check-for-large-grads).",
      step, grad_norm, kSamples, largest_);
}

std::string list_gradients(const std::vector<std::string>& names) {
  constexpr size_t kNamed = 3;
  if (names.empty()) return "the sum of all";
  const size_t named = std::min(kNamed, names.size());
  const std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + named, ", "));
  return names.size() > named ? fmt::format("{} and {} more", text, names.size() - named) : text;
}

}  // namespace troupe
