// Warns of gradients that are much larger than the run's first ones were (Megatron's
// --check-for-large-grads, with its numbers). A plain object; one thread. Nothing here fails.
#pragma once

#include <cstdint>
#include <string>

namespace troupe {

class GradientWatch {
 public:
  // Takes the norm of one step's gradients. The first kSamples finite norms say what is usual; from
  // then on returns a line for a norm of kFactor times their largest, or more, and otherwise
  // nothing. Norms that are not finite are passed over.
  std::string look(int64_t step, double grad_norm);

  static constexpr int64_t kSamples = 100;
  static constexpr double kFactor = 10;

 private:
  int64_t samples_ = 0;
  double largest_ = 0;
};

}  // namespace troupe
