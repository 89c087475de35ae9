#include <algorithm>
#include <cmath>

#include "ops/precision/amax_history/amax_history.h"
#include "program/kernel.h"

namespace troupe {

void delayed_amax_cpu(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<DelayedAmaxAttributes>();
  const Shape& shape = args.input(0).shape;
  const int64_t steps = shape[2];
  const float* history = args.in<float>(0);
  for (int64_t row = 0; row < shape[0] * kHistoryKinds; ++row) {
    const float* own = history + row * steps;
    const float amax = attributes.most_recent ? *own : *std::max_element(own, own + steps);
    const int kind = static_cast<int>(row % kHistoryKinds);
    args.out<float>(kind)[row / kHistoryKinds] = attributes.factor * amax;
  }
}

void amax_history_update_cpu(const KernelArguments& args) {
  if (args.in<int32_t>(3)[0] != 0) return;
  const auto& columns = args.attributes->as<AmaxHistoryAttributes>().column;
  const Shape& shape = args.input(0).shape;
  const int64_t steps = shape[2];
  auto* history = args.out<float>(0);
  for (int64_t row = 0; row < shape[0] * kHistoryKinds; ++row) {
    const auto kind = static_cast<size_t>(row % kHistoryKinds);
    const int parts = kind == kHistoryKinds - 1 ? 2 : 1;
    const Shape& of_ranks = args.input(parts).shape;
    const double* part = args.in<double>(parts) + columns[kind] + row / kHistoryKinds;
    double largest = 0;
    for (int64_t rank = 0; rank < of_ranks[0]; ++rank) {
      largest = std::max(largest, part[rank * of_ranks[1]]);
    }
    if (largest == 0 || !std::isfinite(largest)) continue;
    float* own = history + row * steps;
    std::copy_backward(own, own + steps - 1, own + steps);
    *own = static_cast<float>(largest);
  }
}

}  // namespace troupe
