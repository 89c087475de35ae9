#include "ops/routing/sinkhorn/sinkhorn_cpu.h"

#include <cmath>

#include "ops/cpu/topk.h"
#include "ops/cpu/vector.h"
#include "ops/routing/sinkhorn/sinkhorn.h"

namespace troupe {
namespace {

constexpr double kSinkhornEpsilon = 1e-8;
constexpr double kSinkhornTolerance = 1e-4;

// exp(z) may overflow, so each token's row of C is divided by exp(m_t), m_t its largest logit. That
// changes nothing: with C' = C / exp(m_t) and epsilon'_t = epsilon / exp(m_t)
//   d0'_t = 1 / (T (sum_e C'_te d1_e + epsilon'_t)) = exp(m_t) d0_t,
//   hence C'_te d0'_t = C_te d0_t,
// and d1 depends on C and d0 only through these products. An epsilon'_t that overflows makes d0'_t
// zero, where C_te d0_t is under exp(-700).
template <class T>
void scale_rows(const KernelArguments& args, const SinkhornWorkspace& workspace) {
  const int64_t tokens = args.input(0).shape[0];
  const int64_t experts = args.input(0).shape[1];
  const T* logits = args.in<T>(0);
  args.pool->parallel_ranges(
      tokens, sinkhorn_chunk_tokens(experts), [=](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
          const T* z = logits + token * experts;
          double* c = workspace.scaled + token * experts;
          const double largest = max(z, experts);
          if (!std::isfinite(largest)) {
            std::fill_n(c, experts, 0.0);
            workspace.epsilon[token] = kSinkhornEpsilon;
            continue;
          }
          for (int64_t i = 0; i < experts; ++i) {
            c[i] = std::exp(score_or_none(static_cast<double>(z[i])) - largest);
          }
          workspace.epsilon[token] = kSinkhornEpsilon * std::exp(-largest);
        }
      });
}

// One round: d0 from d1, and d1 from d0. Returns the mean absolute change of d1. The tokens are
// read once: what a token adds to d1's sums is added as soon as its d0 is known. Sums over tokens
// are kept by chunk and added in the order of the chunks.
double balance_experts(const KernelArguments& args, const SinkhornWorkspace& workspace) {
  const int64_t tokens = args.input(0).shape[0];
  const int64_t experts = args.input(0).shape[1];
  const int64_t grain = sinkhorn_chunk_tokens(experts);
  args.pool->parallel_ranges(tokens, grain, [=](int64_t begin, int64_t end, int) {
    double* sums = workspace.chunk_sums + begin / grain * experts;
    std::fill_n(sums, experts, 0.0);
    for (int64_t token = begin; token < end; ++token) {
      const double* c = workspace.scaled + token * experts;
      const double asked = dot(c, workspace.d1, experts) + workspace.epsilon[token];
      axpy(1 / (static_cast<double>(tokens) * asked), c, sums, experts);
    }
  });
  const int64_t chunks = SinkhornWorkspace::chunks(tokens, experts);
  double change = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    double total = kSinkhornEpsilon;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      total += workspace.chunk_sums[chunk * experts + expert];
    }
    const double d1 = 1 / (static_cast<double>(experts) * total);
    change += std::abs(d1 - workspace.d1[expert]);
    workspace.d1[expert] = d1;
  }
  return change / static_cast<double>(experts);
}

// A token's d0 is the same for all experts, and the logarithm keeps the order: compared is
// z + log d1, which neither overflows nor underflows.
template <class T>
void select_balanced(const KernelArguments& args, const SinkhornWorkspace& workspace) {
  const int64_t experts = args.input(0).shape[1];
  const int64_t top_k = args.attributes->as<SinkhornTopkAttributes>().top_k;
  const T* logits = args.in<T>(0);
  auto* indices = args.out<int32_t>(0);
  for (int64_t i = 0; i < experts; ++i) workspace.log_d1[i] = std::log(workspace.d1[i]);
  args.pool->parallel_ranges(args.input(0).shape[0], sinkhorn_chunk_tokens(experts),
                             [&](int64_t begin, int64_t end, int worker) {
                               auto* scores = args.thread_scratch<double>(worker);
                               double* search = scores + experts;
                               for (int64_t token = begin; token < end; ++token) {
                                 const T* z = logits + token * experts;
                                 for (int64_t i = 0; i < experts; ++i) {
                                   scores[i] = static_cast<double>(z[i]) + workspace.log_d1[i];
                                 }
                                 select_largest(scores, experts, top_k, search,
                                                indices + token * top_k);
                               }
                             });
}

template <class T>
void run_sinkhorn_topk(const KernelArguments& args) {
  const int64_t tokens = args.input(0).shape[0];
  const int64_t experts = args.input(0).shape[1];
  const SinkhornWorkspace workspace(reinterpret_cast<double*>(args.workspace), tokens, experts);
  scale_rows<T>(args, workspace);
  std::fill_n(workspace.d1, experts, 1.0);
  for (int round = 0; round < kSinkhornRounds; ++round) {
    if (balance_experts(args, workspace) <= kSinkhornTolerance) break;
  }
  select_balanced<T>(args, workspace);
}

}  // namespace

CpuKernel sinkhorn_topk_cpu_kernel(DType dtype) {
  return dtype == DType::f64 ? &run_sinkhorn_topk<double> : &run_sinkhorn_topk<float>;
}

}  // namespace troupe
