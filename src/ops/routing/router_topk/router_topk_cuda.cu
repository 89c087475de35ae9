#include <algorithm>

#include "ops/cuda/router_tokens.cuh"
#include "ops/cuda/topk.cuh"
#include "ops/routing/router_topk/router_topk.h"

namespace troupe {
namespace {

// Added to the sum of scores by which weights are normalised.
constexpr double kScoreSumEpsilon = 1e-20;

// RouterTopkAttributes as kernels take them.
struct Choice {
  int experts;
  int top_k;
  ScoreFunction function;
  bool pre_softmax;
  double scale;
  int groups;
  int kept_groups;
  int scores_of_group;
  bool divides_by_scores;

  Choice(const RouterTopkAttributes& attributes, int64_t all_experts)
      : experts(static_cast<int>(all_experts)),
        top_k(attributes.top_k),
        function(attributes.score_function),
        pre_softmax(attributes.pre_softmax),
        scale(attributes.scaling_factor),
        groups(attributes.num_groups),
        kept_groups(attributes.group_topk),
        scores_of_group(attributes.num_groups > 0 ? attributes.scores_of_group() : 0),
        divides_by_scores(attributes.divides_by_scores()) {}
};

// The shared memory of a warp, in numbers of T and then indices.
template <class T>
struct ChoiceMemory {
  T* scores;        // [E]
  T* work;          // [E]: with groups
  T* group_scores;  // [groups]
  T* weights;       // [k]
  int32_t* index;   // [k]
  int32_t* kept;    // [groups]

  __device__ ChoiceMemory(std::byte* memory, const Choice& choice)
      : scores(reinterpret_cast<T*>(memory)),
        work(scores + choice.experts),
        group_scores(work + (choice.groups > 0 ? choice.experts : 0)),
        weights(group_scores + choice.groups),
        index(reinterpret_cast<int32_t*>(weights + choice.top_k)),
        kept(index + choice.top_k) {}

  static size_t bytes(const Choice& choice) {
    const auto numbers = static_cast<size_t>(choice.experts * (choice.groups > 0 ? 2 : 1) +
                                             choice.groups + choice.top_k);
    const auto indices = static_cast<size_t>(choice.top_k + choice.groups);
    return (numbers * sizeof(T) + indices * sizeof(int32_t) + 15) / 16 * 16;
  }
};

// Makes the scores of experts outside the best groups NaN, so that they are not taken.
template <class T>
__device__ void keep_best_groups(const Choice& choice, const ChoiceMemory<T>& memory, int lane) {
  const int size = choice.experts / choice.groups;
  for (int group = lane; group < choice.groups; group += 32) {
    T* members = memory.work + group * size;
    for (int i = 0; i < size; ++i) members[i] = memory.scores[group * size + i];
    T total = 0;
    for (int taken = 0; taken < choice.scores_of_group; ++taken) {
      int place = -1;
      for (int i = 0; i < size; ++i) {
        if (members[i] != members[i]) continue;
        if (place < 0 || members[i] > members[place]) place = i;
      }
      total += members[place];
      members[place] = static_cast<T>(NAN);
    }
    memory.group_scores[group] = score_or_none(total);
  }
  __syncwarp();
  take_largest(memory.group_scores, choice.groups, choice.kept_groups, memory.kept);
  // What was taken is NaN now; all others are not kept.
  for (int i = lane; i < choice.experts; i += 32) {
    const T mark = memory.group_scores[i / size];
    if (mark == mark) memory.scores[i] = static_cast<T>(NAN);
  }
  __syncwarp();
}

// T: logits and arithmetic, P: probabilities. A warp for each token.
template <class T, class P>
__global__ void router_topk_kernel(const T* logits, const float* bias, const int32_t* selected,
                                   P* probabilities, int32_t* indices, int64_t tokens,
                                   Choice choice, int warp_bytes) {
  extern __shared__ __align__(16) std::byte shared_memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (token >= tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ChoiceMemory<T> memory(shared_memory + warp * warp_bytes, choice);
  const TokenLogits<T> own{logits + token * choice.experts, choice.experts, lane};
  const bool softmax = choice.function == ScoreFunction::softmax;
  const T largest = softmax ? own.largest() : T(0);

  if (selected != nullptr) {
    for (int slot = lane; slot < choice.top_k; slot += 32) {
      memory.index[slot] = selected[token * choice.top_k + slot];
    }
    __syncwarp();
  } else {
    // The logits stand for scores to which nothing is added.
    const bool exponentials = softmax && choice.groups > 0 && choice.pre_softmax;
    const bool scores = !softmax && (choice.groups > 0 || bias != nullptr);
    for (int i = lane; i < choice.experts; i += 32) {
      T score = own.z[i];
      if (exponentials) score = exp(score - largest);
      if (scores) score = device_score(choice.function, score);
      if (scores && bias != nullptr) score += static_cast<T>(bias[i]);
      memory.scores[i] = score_or_none(score);
    }
    __syncwarp();
    if (choice.groups > 0) keep_best_groups(choice, memory, lane);
    take_largest(memory.scores, choice.experts, choice.top_k, memory.index);
  }

  // The weights.
  T subtracted = largest;
  if (softmax && !choice.pre_softmax) {
    subtracted = -infinity<T>();
    for (int slot = lane; slot < choice.top_k; slot += 32) {
      const T z = own.z[memory.index[slot]];
      subtracted = z > subtracted ? z : subtracted;
    }
    subtracted = warp_max(subtracted);
  }
  T sum = 0;
  for (int slot = lane; slot < choice.top_k; slot += 32) {
    const T z = own.z[memory.index[slot]];
    const T weight = softmax ? exp(z - subtracted) : device_score(choice.function, z);
    memory.weights[slot] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  T total = 1;
  if (!softmax) {
    if (choice.divides_by_scores) total = sum + static_cast<T>(kScoreSumEpsilon);
  } else if (choice.pre_softmax) {
    total = own.sum([&](int i) { return exp(own.z[i] - largest); });
  } else {
    total = sum;
  }
  for (int slot = lane; slot < choice.top_k; slot += 32) {
    const int64_t at = token * choice.top_k + slot;
    probabilities[at] = static_cast<P>(memory.weights[slot] / total * static_cast<T>(choice.scale));
    indices[at] = memory.index[slot];
  }
}

template <class T, class P>
void run_router_topk(const CudaKernelArguments& args) {
  const Shape& shape = args.input(0).shape;
  const Choice choice(args.attributes->as<RouterTopkAttributes>(), shape[1]);
  constexpr size_t kSharedBytes = 48 * 1024;
  const size_t bytes = ChoiceMemory<T>::bytes(choice);
  TROUPE_CHECK(bytes <= kSharedBytes, "router_topk: too many experts for the GPU's shared memory");
  const auto warps = static_cast<int64_t>(std::clamp<size_t>(kSharedBytes / bytes, 1, 8));
  launch(args,
         {static_cast<unsigned>(ceil_divide(shape[0], warps)), static_cast<unsigned>(32 * warps),
          bytes * static_cast<size_t>(warps)},
         router_topk_kernel<T, P>, args.in<T>(0), args.in<float>(1), args.in<int32_t>(2),
         args.out<P>(0), args.out<int32_t>(1), shape[0], choice, static_cast<int>(bytes));
}

// Three formulas, see router_topk.h. A warp for each token.
template <class T, class P>
__global__ void router_topk_gradient_kernel(const P* d_probabilities, const T* logits,
                                            const P* probabilities, const int32_t* indices,
                                            T* d_logits, int64_t tokens, Choice choice) {
  const int64_t token = int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / 32;
  if (token >= tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int top_k = choice.top_k;
  const P* d = d_probabilities + token * top_k;
  const int32_t* index = indices + token * top_k;
  T* dz = d_logits + token * choice.experts;
  const auto over_slots = [&](const auto& term) {
    T sum = 0;
    for (int slot = lane; slot < top_k; slot += 32) sum += term(slot);
    return warp_sum(sum);
  };

  if (logits == nullptr) {  // softmax over the selected
    const P* p = probabilities + token * top_k;
    const T inner = static_cast<T>(1 / choice.scale) *
                    over_slots([&](int slot) { return T(p[slot]) * T(d[slot]); });
    for (int i = lane; i < choice.experts; i += 32) dz[i] = 0;
    __syncwarp();
    for (int slot = lane; slot < top_k; slot += 32) {
      dz[index[slot]] = T(p[slot]) * (T(d[slot]) - inner);
    }
    return;
  }
  const TokenLogits<T> own{logits + token * choice.experts, choice.experts, lane};
  if (choice.function == ScoreFunction::softmax) {
    const T largest = own.largest();
    const T total = own.sum([&](int i) { return exp(own.z[i] - largest); });
    const auto weight = [&](int slot) {
      return exp(own.z[index[slot]] - largest) / total * static_cast<T>(choice.scale) * T(d[slot]);
    };
    const T factor = -over_slots(weight) / total;
    for (int i = lane; i < choice.experts; i += 32) dz[i] = exp(own.z[i] - largest) * factor;
    __syncwarp();
    for (int slot = lane; slot < top_k; slot += 32) dz[index[slot]] += weight(slot);
    return;
  }
  const auto score = [&](int slot) { return device_score(choice.function, own.z[index[slot]]); };
  T total = 1;
  T mean = 0;
  if (choice.divides_by_scores) {
    total = over_slots(score) + static_cast<T>(kScoreSumEpsilon);
    mean = over_slots([&](int slot) { return T(d[slot]) * score(slot); }) / total;
  }
  const T factor = static_cast<T>(choice.scale) / total;
  for (int i = lane; i < choice.experts; i += 32) dz[i] = 0;
  __syncwarp();
  for (int slot = lane; slot < top_k; slot += 32) {
    const T z = own.z[index[slot]];
    dz[index[slot]] =
        factor * (T(d[slot]) - mean) * device_score_slope(choice.function, z, score(slot));
  }
}

template <class T, class P>
void run_router_topk_gradient(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<RouterTopkGradientAttributes>();
  const int64_t tokens = args.output(0).shape[0];
  launch(args, {token_blocks(tokens), 32 * kTokensPerBlock}, router_topk_gradient_kernel<T, P>,
         args.in<P>(0), args.in<T>(1), args.in<P>(2), args.in<int32_t>(3), args.out<T>(0), tokens,
         Choice(attributes.forward, attributes.experts));
}

}  // namespace

CudaKernel router_topk_cuda_kernel(const OpView& op) {
  if (op.input(0).dtype == DType::f32) return &run_router_topk<float, float>;
  return op.output(0).dtype == DType::f64 ? &run_router_topk<double, double>
                                          : &run_router_topk<double, float>;
}

CudaKernel router_topk_gradient_cuda_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::f32) return &run_router_topk_gradient<float, float>;
  return op.input(0).dtype == DType::f64 ? &run_router_topk_gradient<double, double>
                                         : &run_router_topk_gradient<double, float>;
}

}  // namespace troupe
