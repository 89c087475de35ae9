// The scratch memory of the router_topk CPU kernel: shared by the kernel and by the rule that books
// it. Private to this folder.
#pragma once

#include <cstdint>

namespace troupe {

// Logits are searched in blocks of this many.
inline constexpr int64_t kTopkBlock = 16;

inline int64_t topk_blocks(int64_t experts) {
  return (experts + kTopkBlock - 1) / kTopkBlock;
}

// Numbers for each thread: the logits of one token in whole blocks, and the largest of each block.
inline int64_t topk_scratch_elements(int64_t experts) {
  return topk_blocks(experts) * (kTopkBlock + 1);
}

}  // namespace troupe
