#include <algorithm>

#include "ops/cpu/router_scores.h"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/losses/router_loss/router_loss_cpu.h"

namespace troupe {
namespace {

// What the kernels know before they look at a token.
struct BalancingProblem {
  ScoreFunction function;
  int64_t experts;
  int64_t sequence_tokens;  // T*
  int64_t first_token;
  const int32_t* counts;
  TokenMask valid;
  int32_t top_k;
  int32_t sequences;
  double factor;  // c * E / (k * T*^2), over the numbers of sequences and micro-batches

  explicit BalancingProblem(const KernelArguments& args) : valid(args, 2) {
    const auto& attributes = args.attributes->as<LoadBalancingLossAttributes>();
    function = attributes.score_function;
    experts = args.input(0).shape[1];
    sequence_tokens = attributes.sequence_tokens > 0
                          ? attributes.sequence_tokens
                          : args.input(0).shape[0] / attributes.sequences;
    first_token = attributes.first_token;
    counts = args.in<int32_t>(1);
    const auto tokens = static_cast<double>(sequence_tokens);
    factor = attributes.coefficient * static_cast<double>(experts) /
             (attributes.top_k * tokens * tokens * attributes.steps * attributes.sequences);
    top_k = attributes.top_k;
    sequences = attributes.sequences;
    if (valid.mask != nullptr) {
      factor = attributes.coefficient * static_cast<double>(experts) / attributes.sequences;
    }
  }
  const int32_t* counts_of(int64_t token) const {
    return counts + (first_token + token) / sequence_tokens * experts;
  }
  // What the factor lacks where padding does not count: 1 / (N * sum_i n_i) of the sequence.
  double weight_of(int64_t token) const {
    if (valid.mask == nullptr) return 1;
    const int32_t* n = counts_of(token);
    double choices = 0;
    for (int64_t i = 0; i < experts; ++i) choices += n[i];
    const double tokens = sequences == 1 ? *valid.count : choices / top_k;
    return 1 / (std::max(1.0, tokens) * std::max(1.0, choices));
  }
};

// Of one token: the scores s before they are normalised (softmax: exp(z - max z)), what they are
// divided by, and sum_i q_i n_i of the normalised scores q. T is float or double.
template <class T>
struct TokenScores {
  T total;
  T expected;
  TokenScores(const BalancingProblem& problem, int64_t token, const T* z, T* s) {
    const int64_t experts = problem.experts;
    if (problem.function == ScoreFunction::softmax) {
      shifted_exponentials(z, experts, s);
      total = sum(s, experts);
    } else {
      if (problem.function == ScoreFunction::sigmoid) {
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < experts; ++i) s[i] = sigmoid(z[i]);
      } else {
        for (int64_t i = 0; i < experts; ++i) s[i] = sqrtsoftplus(z[i]);
      }
      total = sum(s, experts) + T(1e-20);
    }
    const int32_t* counts = problem.counts_of(token);
    expected =
        lane_sum<T>(experts, [=](int64_t i) { return s[i] * static_cast<T>(counts[i]); }) / total;
  }
};

// The sum is taken token by token: sum_e (sum_t q_te) n_e = sum_t (sum_e q_te n_e).
template <class T>
struct LoadBalancingLossKernel {
  static void run(const KernelArguments& args) {
    const BalancingProblem problem(args);
    const double expected =
        sum_over_tokens<T>(args, problem.valid, [=](int64_t token, const T* z, T* s) {
          return problem.weight_of(token) * TokenScores<T>(problem, token, z, s).expected;
        });
    args.out<T>(0)[0] = static_cast<T>(problem.factor * expected);
  }
};

template <class T>
struct LoadBalancingLossGradientKernel {
  static void run(const KernelArguments& args) {
    const BalancingProblem problem(args);
    const double d_loss = args.inputs.back().as<T>()[0];
    for_each_token<T>(args, problem.valid, [=](int64_t token, const T* z, T* dz) {
      const TokenScores<T> scores(problem, token, z, dz);
      if (problem.function == ScoreFunction::sigmoid) {
        TROUPE_INDEPENDENT
        for (int64_t i = 0; i < problem.experts; ++i) dz[i] = sigmoid_slope(dz[i]);
      } else if (problem.function == ScoreFunction::sqrtsoftplus) {
        for (int64_t i = 0; i < problem.experts; ++i) dz[i] = sqrtsoftplus_slope(z[i], dz[i]);
      }
      const int32_t* counts = problem.counts_of(token);
      const T factor = static_cast<T>(problem.factor * d_loss * problem.weight_of(token));
      const T scale = factor / scores.total;
      TROUPE_INDEPENDENT
      for (int64_t i = 0; i < problem.experts; ++i) {
        dz[i] = scale * dz[i] * (static_cast<T>(counts[i]) - scores.expected);
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
