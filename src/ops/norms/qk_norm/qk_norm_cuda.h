// How the CUDA kernels of qk_norm cut heads into steps, one for each lane, and which kernel takes
// which heads: shared by the kernels and by the rule that names them. Pure functions. Private to
// this folder.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "program/cuda_kernel.h"

namespace troupe {

inline constexpr int kQkThreads = 384;  // of a block, at most

// Whether all halves of all heads, and what does not turn, begin and end with packs.
template <class Attributes>
bool heads_are_made_of_packs(const Attributes& attributes, DType dtype) {
  return is_made_of_packs(attributes.rotary_dim / 2, dtype) &&
         is_made_of_packs(attributes.head_dim, dtype);
}

// Of a head: how many steps of twice `step_elements` it has, and of these, how many turn. 1 <<
// lane_bits lanes share it, enough that each has one step if 32 suffice.
struct QkSteps {
  template <class Attributes>
  QkSteps(const Attributes& attributes, int step_elements)
      : pair_steps(attributes.rotary_dim / 2 / step_elements) {
    const int rest = attributes.head_dim - attributes.rotary_dim / 2 * 2;
    steps = pair_steps + (rest + 2 * step_elements - 1) / (2 * step_elements);
    while (lane_bits < 5 && 1 << lane_bits < steps) ++lane_bits;
  }

  // Rounds in which a block takes the first `heads` heads of a row.
  int64_t rounds(int heads) const {
    return ((int64_t{heads} << lane_bits) + kQkThreads - 1) / kQkThreads;
  }

  int pair_steps, steps;
  int lane_bits = 0;
};

// Whether the kernel that stages rounds of a row in shared memory takes these heads, of which it
// goes through the first `end`: those that turn as a whole, in steps of packs, and, where the whole
// projection is normalised, in one round.
inline bool takes_rounds(const QkNormAttributes& attributes, const QkSteps& steps, bool packs,
                         int end) {
  const bool per_head = attributes.scope == QkNormScope::head;
  return packs && attributes.rotary_dim == attributes.head_dim &&
         steps.steps <= 1 << steps.lane_bits && (per_head || steps.rounds(end) == 1);
}

}  // namespace troupe
