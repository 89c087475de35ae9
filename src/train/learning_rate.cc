#include "train/learning_rate.h"

#include <cmath>
#include <numbers>

namespace troupe {

double LearningRateSchedule::at(int64_t samples) const {
  if (warmup_samples > 0 && samples <= warmup_samples) {
    return max_lr * static_cast<double>(samples) / static_cast<double>(warmup_samples);
  }
  if (style == LrDecayStyle::constant) return max_lr;
  if (samples > decay_samples || decay_samples <= warmup_samples) return min_lr;
  const double progress = static_cast<double>(samples - warmup_samples) /
                          static_cast<double>(decay_samples - warmup_samples);
  const double coefficient = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return min_lr + coefficient * (max_lr - min_lr);
}

}  // namespace troupe
