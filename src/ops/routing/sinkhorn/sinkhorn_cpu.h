// The chunks and the private memory of the sinkhorn CPU kernel: shared by the kernel and by the
// rule that books it. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/topk.h"

namespace troupe {

// Tokens per chunk: about 16k logits.
inline int64_t sinkhorn_chunk_tokens(int64_t experts) {
  return std::max<int64_t>(1, 16384 / experts);
}

// What all threads share.
struct SinkhornWorkspace {
  double* scaled;      // [T, E]: C_te / exp(m_t)
  double* epsilon;     // [T]: 1e-8 / exp(m_t)
  double* chunk_sums;  // [chunks, E]: sums over the tokens of a chunk of C_te d0_t
  double* d1;          // [E]
  double* log_d1;      // [E]

  SinkhornWorkspace(double* memory, int64_t tokens, int64_t experts)
      : scaled(memory),
        epsilon(scaled + tokens * experts),
        chunk_sums(epsilon + tokens),
        d1(chunk_sums + chunks(tokens, experts) * experts),
        log_d1(d1 + experts) {}

  static int64_t chunks(int64_t tokens, int64_t experts) {
    const int64_t chunk = sinkhorn_chunk_tokens(experts);
    return (tokens + chunk - 1) / chunk;
  }
  static int64_t elements(int64_t tokens, int64_t experts) {
    return tokens * experts + tokens + chunks(tokens, experts) * experts + 2 * experts;
  }
};

// What each thread needs: one token's scores, and room to search them.
inline int64_t sinkhorn_scratch_elements(int64_t experts) {
  return experts + topk_search_elements(experts);
}

}  // namespace troupe
