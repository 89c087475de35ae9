// Count experts: how many slots chose each expert, separately for G groups of consecutive tokens
// (the sequences of a micro-batch):
//   counts[g, e] = previous[g, e] + number of indices equal to e among the tokens of group g
// where `previous` is 0 when absent. Token t here is number first_token + t of all tokens, and
// group g is tokens g * S up to (g + 1) * S of those; by default these are all tokens and S is T/G.
// A rank that has a stretch of the tokens counts its own and leaves the other groups at 0. Passing
// the counts of the micro-batch before as `previous` gives the running sums of global_aux_loss.
// With a mask, tokens where it is 0 (padding) are not counted.
//
// Integers that stay on the device; there is no derivative. The kernel counts fixed chunks of
// tokens in parallel.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct CountExpertsAttributes {
  int32_t experts = 0;          // E
  int32_t sequences = 1;        // G
  int32_t sequence_tokens = 0;  // S; 0: T/G, which G must divide
  int32_t first_token = 0;      // first_token + T <= G S
};

// Are `tokens` tokens from number `first_token` on among G sequences of S? (S = 0: all of them.)
bool are_sequences(int64_t tokens, int64_t sequences, int64_t sequence_tokens, int64_t first_token);

// The shape of the counts: [G, E], and for one group [E], as route and the metrics have it.
Shape expert_counts_shape(int64_t sequences, int64_t experts);

// `indices`: i32 [T, k]; those outside [0, E), such as the -1 of a dropped slot, are not counted.
// `previous`: i32 of the result's shape, or invalid. `mask`: i32 [T], or invalid. Returns i32
// counts; sums must stay below 2^31.
ValueId count_experts(Builder& builder, ValueId indices, ValueId previous,
                      const CountExpertsAttributes& attributes, const std::string& name,
                      ValueId mask = {});

// Inputs: indices, previous (optional); with a mask that, too. Output: counts.
extern const OpSpec kCountExperts;

}  // namespace troupe
