#include "ops/load_balancing_loss/load_balancing_loss_cpu.h"

#include "ops/cpu/vector.h"
#include "ops/load_balancing_loss/load_balancing_loss.h"

namespace troupe {
namespace {

// c * E / (k * T^2)
double load_balancing_factor(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<LoadBalancingLossAttributes>();
  const auto tokens = static_cast<double>(args.input(0).shape[0]);
  const auto experts = static_cast<double>(args.input(0).shape[1]);
  return attributes.coefficient * experts / (attributes.top_k * tokens * tokens);
}

// Of one token: e_i = exp(z_i - max z), their sum, and sum_i e_i n_i. T is float or double.
template <class T>
struct TokenScores {
  T total;
  T expected;  // sum_i q_i n_i
  TokenScores(const T* z, const int32_t* counts, int64_t experts, T* e) {
    const T largest = max(z, experts);
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < experts; ++i) e[i] = exp_fast(z[i] - largest);
    total = sum(e, experts);
    expected =
        lane_sum<T>(experts, [=](int64_t i) { return e[i] * static_cast<T>(counts[i]); }) / total;
  }
};

// The sum is taken token by token: sum_e (sum_t q_te) n_e = sum_t (sum_e q_te n_e). Sums over
// tokens are kept in double, one for each chunk, and added in the order of the chunks.
template <class T>
struct LoadBalancingLossKernel {
  static void run(const KernelArguments& args) {
    const int64_t tokens = args.input(0).shape[0];
    const int64_t experts = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const auto* counts = args.in<int32_t>(1);
    const int64_t grain = load_balancing_chunk_tokens(experts);
    auto* partial = reinterpret_cast<double*>(args.workspace);
    args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int worker) {
      T* e = args.thread_scratch<T>(worker);
      double expected = 0;
      for (int64_t token = begin; token < end; ++token) {
        expected += TokenScores<T>(logits + token * experts, counts, experts, e).expected;
      }
      partial[begin / grain] = expected;
    });
    double expected = 0;
    const int64_t chunks = load_balancing_chunks(tokens, experts);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) expected += partial[chunk];
    args.out<T>(0)[0] = static_cast<T>(load_balancing_factor(args) * expected);
  }
};

template <class T>
struct LoadBalancingLossGradientKernel {
  static void run(const KernelArguments& args) {
    const int64_t experts = args.input(0).shape[1];
    const T* logits = args.in<T>(0);
    const auto* counts = args.in<int32_t>(1);
    T* d_logits = args.out<T>(0);
    const T factor =
        static_cast<T>(load_balancing_factor(args) * static_cast<double>(args.in<T>(2)[0]));
    args.pool->parallel_ranges(
        args.input(0).shape[0], load_balancing_chunk_tokens(experts),
        [&](int64_t begin, int64_t end, int) {
          for (int64_t token = begin; token < end; ++token) {
            T* dz = d_logits + token * experts;
            const TokenScores<T> scores(logits + token * experts, counts, experts, dz);
            const T scale = factor / scores.total;
            TROUPE_INDEPENDENT
            for (int64_t i = 0; i < experts; ++i) {
              dz[i] = scale * dz[i] * (static_cast<T>(counts[i]) - scores.expected);
            }
          }
        });
  }
};

}  // namespace

CpuKernel load_balancing_loss_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &LoadBalancingLossKernel<double>::run
                             : &LoadBalancingLossKernel<float>::run;
}

CpuKernel load_balancing_loss_gradient_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &LoadBalancingLossGradientKernel<double>::run
                             : &LoadBalancingLossGradientKernel<float>::run;
}

}  // namespace troupe
