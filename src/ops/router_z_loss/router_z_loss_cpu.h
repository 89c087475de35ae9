// The chunks into which the CPU kernels of the z-loss split their tokens: shared by the kernels and
// by the rule that books their workspace. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

namespace troupe {

// Tokens per chunk: about 16k logits.
inline int64_t router_z_chunk_tokens(int64_t experts) {
  return std::max<int64_t>(1, 16384 / experts);
}

// The forward kernel's workspace holds one double for each chunk.
inline int64_t router_z_chunks(int64_t tokens, int64_t experts) {
  const int64_t chunk = router_z_chunk_tokens(experts);
  return (tokens + chunk - 1) / chunk;
}

}  // namespace troupe
