#include "train/gradient_watch.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

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

}  // namespace troupe
