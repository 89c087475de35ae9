// The loss scale of --fp16: a factor of the loss's gradient that keeps gradients within the range
// of f16. A step whose gradients are not finite changes no weight; after `hysteresis` of them each
// further one halves the scale, and `window` steps in a row without one double it (Megatron Core's
// DynamicGradScaler; Micikevicius et al., "Mixed precision training", 2018).
//
// Plain values and pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "options/options.h"

namespace troupe {

// Where the scale of a run has come to.
struct LossScale {
  double value = 0;            // 0: the run has no step yet
  int64_t clean_steps = 0;     // since the scale changed, or gradients were not finite
  int64_t overflows_left = 0;  // that are let pass before the scale is halved
  bool operator==(const LossScale&) const = default;
};

struct LossScaling {
  bool enabled = false;
  std::optional<double> constant = {};  // it does not change
  double initial = 4294967296.0;
  double least = 1;
  int64_t window = 1000;
  int64_t hysteresis = 2;

  // The scale of the step that begins at `reached`.
  LossScale before(const LossScale& reached) const;
  // The scale after a step that had `scale`.
  LossScale after(LossScale scale, bool overflowed) const;
  // Whether steps like this one can still come to an end by a smaller scale.
  bool can_fall(const LossScale& scale) const { return !constant && scale.value > least; }
};

// "2^16" of a power of two from 2^10 on; others as %g.
std::string loss_scale_text(double scale);

LossScaling loss_scaling_of(const Options& options);

}  // namespace troupe
