// The scratch memory of the router_topk CPU kernel: shared by the kernel and by the rule that books
// it. Private to this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/topk.h"

namespace troupe {

// One token's memory, in numbers of the logits' dtype.
template <class T>
struct TopkScratch {
  T* search;        // [topk_search_elements(E)]
  T* weights;       // [k]
  T* scores;        // [E]
  T* kept_scores;   // [E]: those of the groups that are kept
  T* group_scores;  // [groups]
  // [max(groups, E / groups)]: the best experts of a group, and when all have a score the groups
  // that are kept.
  int32_t* kept_groups;

  TopkScratch(T* memory, int64_t experts, int64_t top_k, int64_t groups)
      : search(memory),
        weights(search + topk_search_elements(experts)),
        scores(weights + top_k),
        kept_scores(scores + experts),
        group_scores(kept_scores + experts),
        kept_groups(reinterpret_cast<int32_t*>(group_scores + groups)) {}

  static int64_t elements(int64_t experts, int64_t top_k, int64_t groups) {
    const int64_t kept = groups == 0 ? 0 : std::max(groups, experts / groups);
    return topk_search_elements(experts) + top_k + 2 * experts + groups + kept;
  }
};

}  // namespace troupe
