#include "options/loss_scaling.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "base/error.h"
#include "options/refuse_without.h"

namespace troupe {

LossScale LossScaling::before(const LossScale& reached) const {
  if (constant) return {.value = *constant};
  if (reached.value > 0) return reached;
  return {.value = initial, .overflows_left = hysteresis};
}

LossScale LossScaling::after(LossScale scale, bool overflowed) const {
  if (constant) return scale;
  if (overflowed) {
    scale.clean_steps = 0;
    scale.overflows_left = std::max<int64_t>(0, scale.overflows_left - 1);
    if (scale.overflows_left == 0) scale.value = std::max(scale.value / 2, least);
  } else if (++scale.clean_steps == window) {
    scale = {.value = scale.value * 2, .overflows_left = hysteresis};
  }
  return scale;
}

std::string loss_scale_text(double scale) {
  int exponent = 0;
  const bool is_power = std::frexp(scale, &exponent) == 0.5;
  return is_power && exponent > 10 ? fmt::format("2^{}", exponent - 1) : fmt::format("{:g}", scale);
}

LossScaling loss_scaling_of(const Options& options) {
  const bool enabled = options.compute_dtype == DType::f16;
  if (!enabled) refuse_without(options.loss_scale.has_value(), "loss-scale", "fp16");
  if (enabled && options.min_loss_scale > options.initial_loss_scale) {
    throw_bad_request(fmt::format("--min-loss-scale {} is above --initial-loss-scale {}.",
                                  options.min_loss_scale, options.initial_loss_scale));
  }
  return {.enabled = enabled,
          .constant = options.loss_scale,
          .initial = options.initial_loss_scale,
          .least = options.min_loss_scale,
          .window = options.loss_scale_window,
          .hysteresis = options.hysteresis};
}

}  // namespace troupe
