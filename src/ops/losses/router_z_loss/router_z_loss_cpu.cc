#include <cmath>

#include "ops/cpu/router_scores.h"
#include "ops/losses/router_loss/router_loss_cpu.h"
#include "ops/losses/router_z_loss/router_z_loss.h"

namespace troupe {
namespace {

// Of one token: e_i = exp(z_i - max z), their sum, and log sum_i exp(z_i). T is float or double.
template <class T>
struct TokenLogSum {
  T total;
  T log_sum;
  TokenLogSum(const T* z, int64_t experts, T* e) {
    const T largest = shifted_exponentials(z, experts, e);
    total = sum(e, experts);
    log_sum = largest + std::log(total);
  }
};

template <class T>
struct RouterZLossKernel {
  static void run(const KernelArguments& args) {
    const TokenMask valid(args, 1);
    const int64_t experts = args.input(0).shape[1];
    const double squares = sum_over_tokens<T>(args, valid, [=](int64_t, const T* z, T* e) {
      const double log_sum = TokenLogSum<T>(z, experts, e).log_sum;
      return log_sum * log_sum;
    });
    const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
    args.out<T>(0)[0] =
        static_cast<T>(coefficient * squares / valid.divisor(args.input(0).shape[0]));
  }
};

template <class T>
struct RouterZLossGradientKernel {
  static void run(const KernelArguments& args) {
    const TokenMask valid(args, 1);
    const int64_t experts = args.input(0).shape[1];
    const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
    const T* d_loss = args.inputs.back().as<T>();
    const T factor = static_cast<T>(2 * coefficient / valid.divisor(args.input(0).shape[0]) *
                                    static_cast<double>(*d_loss));
    for_each_token<T>(args, valid, [=](int64_t, const T* z, T* dz) {
      const TokenLogSum<T> scores(z, experts, dz);
      const T scale = factor * scores.log_sum / scores.total;
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < experts; ++i) dz[i] *= scale;
    });
  }
};

}  // namespace

CpuKernel router_z_loss_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &RouterZLossKernel<double>::run : &RouterZLossKernel<float>::run;
}

CpuKernel router_z_loss_gradient_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &RouterZLossGradientKernel<double>::run
                             : &RouterZLossGradientKernel<float>::run;
}

}  // namespace troupe
