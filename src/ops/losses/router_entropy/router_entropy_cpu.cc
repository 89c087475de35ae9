#include <cmath>

#include "ops/cpu/router_scores.h"
#include "ops/losses/router_entropy/router_entropy.h"
#include "ops/losses/router_loss/router_loss_cpu.h"

namespace troupe {
namespace {

// With e_i = exp(z_i - max z) and their sum s: H = ln s - sum_i e_i (z_i - max z) / s.
template <class T>
struct RouterEntropyKernel {
  static void run(const KernelArguments& args) {
    const TokenMask valid(args, 1);
    const int64_t experts = args.input(0).shape[1];
    const double entropies = sum_over_tokens<T>(args, valid, [=](int64_t, const T* z, T* e) {
      const T largest = shifted_exponentials(z, experts, e);
      const T total = sum(e, experts);
      const T weighted = lane_sum<T>(
          experts, [=](int64_t i) { return e[i] > T(0) ? e[i] * (z[i] - largest) : T(0); });
      return std::log(total) - weighted / total;
    });
    args.out<T>(0)[0] = static_cast<T>(entropies / valid.divisor(args.input(0).shape[0]));
  }
};

}  // namespace

CpuKernel router_entropy_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &RouterEntropyKernel<double>::run : &RouterEntropyKernel<float>::run;
}

}  // namespace troupe
