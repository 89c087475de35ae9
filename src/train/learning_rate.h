// Learning-rate schedules, as Megatron's optimizer_param_scheduler computes them. Pure functions.
#pragma once

#include <cstdint>

namespace troupe {

enum class LrDecayStyle : uint8_t { constant, cosine };

// All lengths are in samples (sequences), so that a schedule does not depend on the batch size.
struct LearningRateSchedule {
  LrDecayStyle style = LrDecayStyle::cosine;
  double max_lr = 0;
  double min_lr = 0;
  int64_t warmup_samples = 0;
  int64_t decay_samples = 0;  // where the decay ends, warm-up included

  // The rate of the update that has `samples` samples behind it when it is done: linear from 0 to
  // max_lr at warmup_samples, then the decay, then min_lr (constant: max_lr).
  double at(int64_t samples) const;
};

}  // namespace troupe
