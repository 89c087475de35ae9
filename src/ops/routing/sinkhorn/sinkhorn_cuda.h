// The scratch memory of sinkhorn_topk on a GPU, in doubles: shared by its kernels and by the rule
// that books it; sinkhorn_cpu.cc says why rows are scaled. Pure functions. Private to this folder.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace troupe {

inline constexpr int kBalanceThreads = 1024;

struct Balance {
  double* scaled;   // [T, E]: C_te / exp(m_t)
  double* epsilon;  // [T]: 1e-8 / exp(m_t)
  double* d0;       // [T]
  double* d1;       // [E]
  double* partial;  // [slices, E]

  Balance(std::byte* memory, int64_t tokens, int64_t experts)
      : scaled(reinterpret_cast<double*>(memory)),
        epsilon(scaled + tokens * experts),
        d0(epsilon + tokens),
        d1(d0 + tokens),
        partial(d1 + experts) {}

  // How many parts of the tokens are summed apart for each expert.
  static int64_t slices(int64_t experts) { return std::max<int64_t>(1, kBalanceThreads / experts); }
  static int64_t elements(int64_t tokens, int64_t experts) {
    return tokens * experts + 2 * tokens + experts + slices(experts) * experts;
  }
};

}  // namespace troupe
