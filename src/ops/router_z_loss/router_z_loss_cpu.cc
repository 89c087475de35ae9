#include "ops/router_z_loss/router_z_loss_cpu.h"

#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/router_z_loss/router_z_loss.h"

namespace troupe {
namespace {

// Of one token: e_i = exp(z_i - max z), their sum, and log sum_i exp(z_i). T is float or double.
template <class T>
struct TokenLogSum {
  T total;
  T log_sum;
  TokenLogSum(const T* z, int64_t experts, T* e) {
    const T largest = max(z, experts);
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < experts; ++i) e[i] = exp_fast(z[i] - largest);
    total = sum(e, experts);
    log_sum = largest + std::log(total);
  }
};

// Sums over tokens are kept in double, one for each chunk, and added in the order of the chunks.
template <class T>
struct RouterZLossKernel {
  static void run(const KernelArguments& args) {
    const int64_t tokens = args.input(0).shape[0];
    const int64_t experts = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const int64_t grain = router_z_chunk_tokens(experts);
    auto* partial = reinterpret_cast<double*>(args.workspace);
    args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int worker) {
      T* e = args.thread_scratch<T>(worker);
      double squares = 0;
      for (int64_t token = begin; token < end; ++token) {
        const double log_sum = TokenLogSum<T>(logits + token * experts, experts, e).log_sum;
        squares += log_sum * log_sum;
      }
      partial[begin / grain] = squares;
    });
    double squares = 0;
    const int64_t chunks = router_z_chunks(tokens, experts);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) squares += partial[chunk];
    const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
    args.out<T>(0)[0] = static_cast<T>(coefficient * squares / static_cast<double>(tokens));
  }
};

template <class T>
struct RouterZLossGradientKernel {
  static void run(const KernelArguments& args) {
    const int64_t tokens = args.input(0).shape[0];
    const int64_t experts = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    T* d_logits = args.out<T>(0);
    const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
    const T factor = static_cast<T>(2 * coefficient / static_cast<double>(tokens) *
                                    static_cast<double>(args.in<T>(1)[0]));
    args.pool->parallel_ranges(
        tokens, router_z_chunk_tokens(experts), [&](int64_t begin, int64_t end, int) {
          for (int64_t token = begin; token < end; ++token) {
            T* dz = d_logits + token * experts;
            const TokenLogSum<T> scores(logits + token * experts, experts, dz);
            const T scale = factor * scores.log_sum / scores.total;
            TROUPE_INDEPENDENT
            for (int64_t i = 0; i < experts; ++i) dz[i] *= scale;
          }
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
