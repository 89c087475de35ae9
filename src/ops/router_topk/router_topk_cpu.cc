#include "ops/router_topk/router_topk_cpu.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/router_topk/router_topk.h"

namespace troupe {
namespace {

// Logits per chunk.
constexpr int64_t kTopkChunkLogits = 16384;

int64_t topk_chunk_tokens(int64_t experts) {
  return std::max<int64_t>(1, kTopkChunkLogits / experts);
}

// b when a is NaN.
template <class T>
T larger_logit(T a, T b) {
  return a > b ? a : b;
}

// The largest of n = 2, 4, 8, ... numbers, pairwise: a chain of log2(n) comparisons.
template <int64_t n, class T>
[[gnu::always_inline]] inline T largest_logit(const T* x) {
  if constexpr (n == 1) {
    return x[0];
  } else {
    return larger_logit(largest_logit<n / 2>(x), largest_logit<n / 2>(x + n / 2));
  }
}

// Takes the largest logit k times; of equals the one with the lowest index. Searching the blocks'
// maxima and then one block has no branch that depends on the data; insertion into a sorted list
// does, and takes several times as long.
//
// Fills largest[k], descending, and index[k] from z[E]. NaN counts as -infinity; `work` is room for
// topk_scratch_elements(E) numbers.
template <class T>
void select_largest(const T* z, int64_t experts, int64_t top_k, T* work, T* largest,
                    int32_t* index) {
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  const int64_t blocks = topk_blocks(experts);
  T* maxima = work + blocks * kTopkBlock;
  for (int64_t i = 0; i < experts; ++i) work[i] = larger_logit(z[i], kNone);  // NaN becomes kNone
  std::fill(work + experts, maxima, kNone);
  for (int64_t block = 0; block < blocks; ++block) {
    maxima[block] = largest_logit<kTopkBlock>(work + block * kTopkBlock);
  }
  for (int64_t slot = 0; slot < top_k; ++slot) {
    int64_t block = 0;
    T value = maxima[0];
    for (int64_t b = 1; b < blocks; ++b) {
      block = maxima[b] > value ? b : block;
      value = maxima[b] > value ? maxima[b] : value;
    }
    int64_t expert = 0;
    if (value > kNone) [[likely]] {
      T* scores = work + block * kTopkBlock;
      uint32_t found = 0;
      for (int i = 0; i < kTopkBlock; ++i) found |= static_cast<uint32_t>(scores[i] >= value) << i;
      const int lane = std::countr_zero(found);
      expert = block * kTopkBlock + lane;
      scores[lane] = kNone;
      maxima[block] = largest_logit<kTopkBlock>(scores);
    } else {
      // Only -infinity and NaN are left: the first that has not been taken.
      while (std::find(index, index + slot, expert) != index + slot) ++expert;
    }
    index[slot] = static_cast<int32_t>(expert);
    largest[slot] = z[expert];
  }
}

// The weights of one token: replaces the selected logits in p[k] by them. T is the type of the
// logits, float or double; `e` is room for E numbers, used only with pre_softmax.
template <class T>
void weigh_selected(const T* z, int64_t experts, int64_t top_k, bool pre_softmax, T scale, T* e,
                    T* p) {
  const T largest = p[0];
  T total = 0;
  if (pre_softmax) {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < experts; ++i) e[i] = exp_fast(z[i] - largest);
    total = sum(e, experts);
  }
  for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = exp_fast(p[slot] - largest);
  if (!pre_softmax) total = sum(p, top_k);
  for (int64_t slot = 0; slot < top_k; ++slot) p[slot] = p[slot] / total * scale;
}

template <class T>
struct RouterTopkKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<RouterTopkAttributes>();
    const int64_t experts = args.input(0).shape[1];
    const int64_t top_k = attributes.top_k;
    const bool pre_softmax = attributes.pre_softmax;
    const T* logits = args.in<T>(0);
    T* probabilities = args.out<T>(0);
    auto* indices = args.out<int32_t>(1);
    const T scale = static_cast<T>(attributes.scaling_factor);
    args.pool->parallel_ranges(args.input(0).shape[0], topk_chunk_tokens(experts),
                               [&](int64_t begin, int64_t end, int worker) {
                                 T* work = args.thread_scratch<T>(worker);
                                 for (int64_t token = begin; token < end; ++token) {
                                   const T* z = logits + token * experts;
                                   T* p = probabilities + token * top_k;
                                   select_largest(z, experts, top_k, work, p,
                                                  indices + token * top_k);
                                   weigh_selected(z, experts, top_k, pre_softmax, scale, work, p);
                                 }
                               });
  }
};

template <class T>
struct RouterTopkGradientKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<RouterTopkGradientAttributes>();
    const int64_t experts = attributes.experts;
    const int64_t top_k = attributes.forward.top_k;
    const T* d_probabilities = args.in<T>(0);
    const T* logits = args.in<T>(1);
    const T* probabilities = args.in<T>(2);
    const auto* indices = args.in<int32_t>(3);
    T* d_logits = args.out<T>(0);
    const T inverse_scale = static_cast<T>(1 / attributes.forward.scaling_factor);
    args.pool->parallel_ranges(
        args.output(0).shape[0], topk_chunk_tokens(experts), [&](int64_t begin, int64_t end, int) {
          for (int64_t token = begin; token < end; ++token) {
            const T* d = d_probabilities + token * top_k;
            const T* p = probabilities + token * top_k;
            const int32_t* index = indices + token * top_k;
            T* dz = d_logits + token * experts;
            const T inner = dot(p, d, top_k);
            if (logits == nullptr) {
              std::fill_n(dz, experts, T(0));
              for (int64_t slot = 0; slot < top_k; ++slot) {
                dz[index[slot]] = p[slot] * (d[slot] - inverse_scale * inner);
              }
            } else {
              // Slot 0 holds the largest logit and, times 1/g, its softmax: the others follow.
              const T* z = logits + token * experts;
              const T largest = z[index[0]];
              const T factor = -inner * inverse_scale * p[0];
              TROUPE_INDEPENDENT
              for (int64_t i = 0; i < experts; ++i) dz[i] = factor * exp_fast(z[i] - largest);
              for (int64_t slot = 0; slot < top_k; ++slot) dz[index[slot]] += p[slot] * d[slot];
            }
          }
        });
  }
};

}  // namespace

CpuKernel router_topk_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &RouterTopkKernel<double>::run : &RouterTopkKernel<float>::run;
}

CpuKernel router_topk_gradient_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &RouterTopkGradientKernel<double>::run
                             : &RouterTopkGradientKernel<float>::run;
}

}  // namespace troupe
