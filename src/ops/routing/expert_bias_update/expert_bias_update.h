// Expert bias update: balances the experts without an auxiliary loss (Wang et al., "Auxiliary-loss-
// free load balancing strategy for mixture-of-experts", 2024; DeepSeek-V3; Megatron Core). Once per
// step, the bias that the selection of experts adds to their scores moves by a fixed amount towards
// balance:
//   bias[e] = bias[e] + rate * sign(mean - counts[e]),   mean = sum_i counts[i] / E
// with sign(0) = 0: an expert with exactly the mean load keeps its bias. (Compared are the sum and
// E * counts[e], so that rounding cannot make a balanced expert look unbalanced.) Nothing changes
// when skip is not 0, the flag that stops adamw too. There is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ExpertBiasUpdateAttributes {
  double rate = 1e-3;
};

// `bias`: f32 [E], state, changed in place; `counts`: f64 [E], tokens that chose each expert in the
// whole step; `skip`: i32 [1].
void expert_bias_update(Builder& builder, ValueId bias, ValueId counts, ValueId skip,
                        const ExpertBiasUpdateAttributes& attributes);

// Inputs: bias, counts, skip. Output, in place: bias.
extern const OpSpec kExpertBiasUpdate;

}  // namespace troupe
