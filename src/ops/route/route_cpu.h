// The chunks into which route's CPU kernel splits its tokens: shared by the kernel and by the rule
// that books its workspace. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

namespace troupe {

// Tokens per chunk: about 16k slots, so that small batches are one chunk.
inline int64_t route_chunk_tokens(int64_t top_k) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, top_k));
}

// The workspace holds one histogram of E counters for each chunk.
inline int64_t route_chunks(int64_t tokens, int64_t top_k) {
  const int64_t chunk = route_chunk_tokens(top_k);
  return (tokens + chunk - 1) / chunk;
}

}  // namespace troupe
