// What is said of gradients that are much larger than the run's first ones were (Megatron's
// --check-for-large-grads, with its numbers), and of those that are not finite. Plain objects; one
// thread. Nothing here fails.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// Gradients that are not finite, for a message: the first few of their parameters' names, and how
// many more there are. Without any, each may be finite and the sum of their squares not.
std::string list_gradients(const std::vector<std::string>& names);

}  // namespace troupe
