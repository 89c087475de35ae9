#include "ops/cuda/router_tokens.cuh"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"

namespace troupe {
namespace {

// What the kernels know before they look at a token: BalancingProblem of
// load_balancing_loss_cpu.cc.
struct Balancing {
  ScoreFunction function;
  int experts;
  int64_t sequence_tokens;
  int64_t first_token;
  const int32_t* counts;
  DeviceTokenMask valid;
  int32_t top_k;
  int32_t sequences;
  double factor;

  explicit Balancing(const CudaKernelArguments& args) : valid(args, 2) {
    const auto& attributes = args.attributes->as<LoadBalancingLossAttributes>();
    const Shape& logits = args.input(0).shape;
    function = attributes.score_function;
    experts = static_cast<int>(logits[1]);
    sequence_tokens = attributes.sequence_tokens > 0 ? attributes.sequence_tokens
                                                     : logits[0] / attributes.sequences;
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
};

// Of one token: the scores before they are normalised, what they are divided by, and
// sum_i q_i n_i of the normalised scores q.
template <class T>
struct BalancedScores {
  ScoreFunction function;
  const TokenLogits<T>& logits;
  const int32_t* counts;
  T largest;
  T total;
  T expected;

  __device__ BalancedScores(const Balancing& problem, int64_t token, const TokenLogits<T>& own)
      : function(problem.function),
        logits(own),
        counts(problem.counts +
               (problem.first_token + token) / problem.sequence_tokens * problem.experts),
        largest(0) {
    const bool softmax = function == ScoreFunction::softmax;
    if (softmax) largest = logits.largest();
    total = logits.sum([&](int i) { return score(i); });
    if (!softmax) total += T(1e-20);
    expected = logits.sum([&](int i) { return score(i) * static_cast<T>(counts[i]); }) / total;
  }
  // What the factor lacks where padding does not count: 1 / (N * sum_i n_i) of the sequence.
  __device__ double weight(const Balancing& problem) const {
    if (problem.valid.mask == nullptr) return 1;
    double choices = 0;
    for (int i = logits.lane; i < logits.experts; i += 32) choices += counts[i];
    choices = warp_sum(choices);
    const double tokens = problem.sequences == 1 ? *problem.valid.count : choices / problem.top_k;
    return 1 / (fmax(1.0, tokens) * fmax(1.0, choices));
  }
  __device__ T score(int i) const {
    return function == ScoreFunction::softmax ? exp(logits.z[i] - largest)
                                              : device_score(function, logits.z[i]);
  }
  __device__ T slope(int i) const {
    const T s = score(i);
    return function == ScoreFunction::softmax ? s : device_score_slope(function, logits.z[i], s);
  }
};

template <class T>
struct ExpectedTerm {
  Balancing problem;
  __device__ double operator()(int64_t token, const TokenLogits<T>& logits) const {
    const BalancedScores<T> scores(problem, token, logits);
    return scores.weight(problem) * scores.expected;
  }
};

template <class T>
void run_load_balancing_loss(const CudaKernelArguments& args) {
  const Balancing problem(args);
  sum_over_tokens<T>(args, problem.factor, problem.valid, nullptr, ExpectedTerm<T>{problem});
}

template <class T>
struct BalancingGradient {
  Balancing problem;
  const T* d_loss;
  __device__ void operator()(int64_t token, const TokenLogits<T>& logits, T* dz) const {
    const BalancedScores<T> scores(problem, token, logits);
    const double factor = problem.factor * static_cast<double>(*d_loss) * scores.weight(problem);
    const T scale = static_cast<T>(factor) / scores.total;
    for (int i = logits.lane; i < logits.experts; i += 32) {
      dz[i] = scale * scores.slope(i) * (static_cast<T>(scores.counts[i]) - scores.expected);
    }
  }
};

template <class T>
void run_load_balancing_loss_gradient(const CudaKernelArguments& args) {
  const Balancing problem(args);
  for_each_token<T>(args, problem.valid, BalancingGradient<T>{problem, args.inputs.back().as<T>()});
}

}  // namespace

CudaKernel load_balancing_loss_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_load_balancing_loss<double>
                                         : &run_load_balancing_loss<float>;
}

CudaKernel load_balancing_loss_gradient_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_load_balancing_loss_gradient<double>
                                         : &run_load_balancing_loss_gradient<float>;
}

}  // namespace troupe
