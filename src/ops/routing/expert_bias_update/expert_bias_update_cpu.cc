#include "ops/routing/expert_bias_update/expert_bias_update.h"
#include "program/kernel.h"

namespace troupe {

void expert_bias_update_cpu(const KernelArguments& args) {
  if (args.in<int32_t>(2)[0] != 0) return;
  const int64_t experts = args.input(0).shape[0];
  const auto* counts = args.in<double>(1);
  auto* bias = args.out<float>(0);
  const auto rate = static_cast<float>(args.attributes->as<ExpertBiasUpdateAttributes>().rate);
  double total = 0;
  for (int64_t i = 0; i < experts; ++i) total += counts[i];
  for (int64_t i = 0; i < experts; ++i) {
    const double share = static_cast<double>(experts) * counts[i];
    if (share < total) bias[i] += rate;
    if (share > total) bias[i] -= rate;
  }
}

}  // namespace troupe
