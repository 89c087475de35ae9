#include "ops/routing/router_topk/router_topk_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/router_scores.h"
#include "ops/cpu/topk.h"
#include "ops/cpu/vector.h"
#include "ops/routing/router_topk/router_topk.h"

namespace troupe {
namespace {

// Logits per chunk.
constexpr int64_t kTopkChunkLogits = 16384;

int64_t topk_chunk_tokens(int64_t experts) {
  return std::max<int64_t>(1, kTopkChunkLogits / experts);
}

// Added to the sum of scores by which weights are normalised.
constexpr double kScoreSumEpsilon = 1e-20;

// sigmoid or sqrtsoftplus, and its derivative where the score is `score`.
template <class T>
T score_of(ScoreFunction function, T z) {
  return function == ScoreFunction::sigmoid ? sigmoid(z) : sqrtsoftplus(z);
}
template <class T>
T score_slope(ScoreFunction function, T z, T score) {
  return function == ScoreFunction::sigmoid ? sigmoid_slope(score) : sqrtsoftplus_slope(z, score);
}

// What the selection compares: the logits, or scores that are computed into `scores`.
template <class T>
const T* compared_scores(const T* z, const float* bias, int64_t experts,
                         const RouterTopkAttributes& attributes, T* scores) {
  const bool groups = attributes.num_groups > 0;
  if (attributes.score_function == ScoreFunction::softmax) {
    if (!groups || !attributes.pre_softmax) return z;
    // Without the division by their sum, which is the same for all experts of the token.
    shifted_exponentials(z, experts, scores);
    return scores;
  }
  if (!groups && bias == nullptr) return z;
  if (attributes.score_function == ScoreFunction::sigmoid) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < experts; ++i) scores[i] = sigmoid(z[i]);
  } else {
    for (int64_t i = 0; i < experts; ++i) scores[i] = score_of(attributes.score_function, z[i]);
  }
  if (bias != nullptr) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < experts; ++i) scores[i] += static_cast<T>(bias[i]);
  }
  return scores;
}

// Selects within the best groups: their scores are put one after the other and searched as if there
// were no other experts.
template <class T>
void select_in_groups(const T* scores, int64_t experts, const RouterTopkAttributes& attributes,
                      const TopkScratch<T>& scratch, int32_t* index) {
  const int64_t groups = attributes.num_groups;
  const int64_t kept = attributes.group_topk;
  const int64_t size = experts / groups;
  const int64_t counted = attributes.scores_of_group();
  for (int64_t group = 0; group < groups; ++group) {
    const T* members = scores + group * size;
    select_largest(members, size, counted, scratch.search, scratch.kept_groups);
    T total = 0;
    for (int64_t i = 0; i < counted; ++i) total += score_or_none(members[scratch.kept_groups[i]]);
    scratch.group_scores[group] = total;
  }
  select_largest(scratch.group_scores, groups, kept, scratch.search, scratch.kept_groups);
  // In ascending order, so that of equal scores the lower expert is first.
  std::sort(scratch.kept_groups, scratch.kept_groups + kept);
  for (int64_t i = 0; i < kept; ++i) {
    std::copy_n(scores + scratch.kept_groups[i] * size, size, scratch.kept_scores + i * size);
  }
  select_largest(scratch.kept_scores, kept * size, attributes.top_k, scratch.search, index);
  for (int64_t slot = 0; slot < attributes.top_k; ++slot) {
    const int64_t group = scratch.kept_groups[index[slot] / size];
    index[slot] = static_cast<int32_t>(group * size + index[slot] % size);
  }
}

// The weights p[k] of one token. T is the type of the logits, float or double; `e` is room for E
// numbers, used only with pre-softmax.
template <class T>
void weigh_selected(const T* z, const int32_t* index, int64_t experts,
                    const RouterTopkAttributes& attributes, T* e, T* p) {
  const int64_t top_k = attributes.top_k;
  const T scale = static_cast<T>(attributes.scaling_factor);
  for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = z[index[slot]];
  T total = 1;
  if (attributes.score_function != ScoreFunction::softmax) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      p[slot] = score_of(attributes.score_function, p[slot]);
    }
    if (attributes.divides_by_scores()) {
      total = sum(p, top_k) + static_cast<T>(kScoreSumEpsilon);
    }
  } else if (attributes.pre_softmax) {
    shifted_exponentials(z, experts, e);
    total = sum(e, experts);
    for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = e[index[slot]];
  } else {
    T largest = p[0];
    for (int64_t slot = 1; slot < top_k; ++slot) largest = larger_score(p[slot], largest);
    for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = exp_fast(p[slot] - largest);
    total = sum(p, top_k);
  }
  for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = p[slot] / total * scale;
}

// T: logits and arithmetic, P: probabilities.
template <class T, class P>
void run_router_topk(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RouterTopkAttributes>();
  const int64_t experts = args.input(0).shape[1];
  const int64_t top_k = attributes.top_k;
  const T* logits = args.in<T>(0);
  const auto* bias = args.in<float>(1);
  const auto* selected = args.in<int32_t>(2);
  P* probabilities = args.out<P>(0);
  auto* indices = args.out<int32_t>(1);
  args.pool->parallel_ranges(
      args.input(0).shape[0], topk_chunk_tokens(experts),
      [&](int64_t begin, int64_t end, int worker) {
        const TopkScratch<T> scratch(args.thread_scratch<T>(worker), experts, top_k,
                                     attributes.num_groups);
        for (int64_t token = begin; token < end; ++token) {
          const T* z = logits + token * experts;
          int32_t* index = indices + token * top_k;
          if (selected != nullptr) {
            std::copy_n(selected + token * top_k, top_k, index);
          } else {
            const T* scores = compared_scores(z, bias, experts, attributes, scratch.scores);
            if (attributes.num_groups > 0) {
              select_in_groups(scores, experts, attributes, scratch, index);
            } else {
              select_largest(scores, experts, top_k, scratch.search, index);
            }
          }
          weigh_selected(z, index, experts, attributes, scratch.search, scratch.weights);
          P* p = probabilities + token * top_k;
          for (int64_t slot = 0; slot < top_k; ++slot)
            p[slot] = static_cast<P>(scratch.weights[slot]);
        }
      });
}

// One token's gradients. `weights` is room for k numbers.
template <class T, class P>
void differentiate_post_softmax(const P* d, const P* p, const int32_t* index, int64_t experts,
                                const RouterTopkAttributes& attributes, T* dz) {
  const int64_t top_k = attributes.top_k;
  const T inverse_scale = static_cast<T>(1 / attributes.scaling_factor);
  const T inner = lane_sum<T>(top_k, [=](int64_t slot) { return T(p[slot]) * T(d[slot]); });
  std::fill_n(dz, experts, T(0));
  for (int64_t slot = 0; slot < top_k; ++slot) {
    dz[index[slot]] = T(p[slot]) * (T(d[slot]) - inverse_scale * inner);
  }
}

template <class T, class P>
void differentiate_pre_softmax(const P* d, const T* z, const int32_t* index, int64_t experts,
                               const RouterTopkAttributes& attributes, T* weights, T* dz) {
  const int64_t top_k = attributes.top_k;
  shifted_exponentials(z, experts, dz);
  const T total = sum(dz, experts);
  // What the selected experts add: P_i d_i.
  for (int64_t slot = 0; slot < top_k; ++slot) {
    weights[slot] =
        dz[index[slot]] / total * static_cast<T>(attributes.scaling_factor) * T(d[slot]);
  }
  const T factor = -sum(weights, top_k) / total;
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < experts; ++i) dz[i] *= factor;
  for (int64_t slot = 0; slot < top_k; ++slot) dz[index[slot]] += weights[slot];
}

template <class T, class P>
void differentiate_scores(const P* d, const T* z, const int32_t* index, int64_t experts,
                          const RouterTopkAttributes& attributes, T* weights, T* dz) {
  const int64_t top_k = attributes.top_k;
  const ScoreFunction function = attributes.score_function;
  for (int64_t slot = 0; slot < top_k; ++slot) weights[slot] = score_of(function, z[index[slot]]);
  T total = 1;
  T mean = 0;
  if (attributes.divides_by_scores()) {
    total = sum(weights, top_k) + static_cast<T>(kScoreSumEpsilon);
    mean = lane_sum<T>(top_k, [=](int64_t slot) { return T(d[slot]) * weights[slot]; }) / total;
  }
  const T factor = static_cast<T>(attributes.scaling_factor) / total;
  std::fill_n(dz, experts, T(0));
  for (int64_t slot = 0; slot < top_k; ++slot) {
    const int32_t expert = index[slot];
    dz[expert] = factor * (T(d[slot]) - mean) * score_slope(function, z[expert], weights[slot]);
  }
}

template <class T, class P>
void run_router_topk_gradient(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<RouterTopkGradientAttributes>();
  const RouterTopkAttributes& forward = attributes.forward;
  const int64_t experts = attributes.experts;
  const int64_t top_k = forward.top_k;
  const P* d_probabilities = args.in<P>(0);
  const T* logits = args.in<T>(1);
  const P* probabilities = args.in<P>(2);
  const auto* indices = args.in<int32_t>(3);
  T* d_logits = args.out<T>(0);
  args.pool->parallel_ranges(args.output(0).shape[0], topk_chunk_tokens(experts),
                             [&](int64_t begin, int64_t end, int worker) {
                               T* weights = args.thread_scratch<T>(worker);
                               for (int64_t token = begin; token < end; ++token) {
                                 const P* d = d_probabilities + token * top_k;
                                 const int32_t* index = indices + token * top_k;
                                 T* dz = d_logits + token * experts;
                                 if (logits == nullptr) {
                                   differentiate_post_softmax(d, probabilities + token * top_k,
                                                              index, experts, forward, dz);
                                 } else if (forward.score_function == ScoreFunction::softmax) {
                                   differentiate_pre_softmax(d, logits + token * experts, index,
                                                             experts, forward, weights, dz);
                                 } else {
                                   differentiate_scores(d, logits + token * experts, index, experts,
                                                        forward, weights, dz);
                                 }
                               }
                             });
}

}  // namespace

CpuKernel router_topk_cpu_kernel(DType logits, DType probabilities) {
  if (logits == DType::f32) return &run_router_topk<float, float>;
  return probabilities == DType::f64 ? &run_router_topk<double, double>
                                     : &run_router_topk<double, float>;
}

CpuKernel router_topk_gradient_cpu_kernel(DType logits, DType probabilities) {
  if (logits == DType::f32) return &run_router_topk_gradient<float, float>;
  return probabilities == DType::f64 ? &run_router_topk_gradient<double, double>
                                     : &run_router_topk_gradient<double, float>;
}

}  // namespace troupe
