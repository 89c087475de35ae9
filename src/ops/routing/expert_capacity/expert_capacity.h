// Expert capacity: drops the slots of a micro-batch that go beyond what each expert may take
// (GShard, Switch Transformer; semantics of Megatron Core's token dropping). Of the slots that name
// an expert at most C are kept:
//   probs      those with the largest probabilities; of equal ones the earlier tokens'. NaN counts
//              as less than every number.
//   position   those of the tokens that stand earliest in their sequences; of equal places those of
//              the earlier sequences. Token t here is number first_token + t of all tokens, and
//              sequence g is tokens g * S up to (g + 1) * S of those.
// Dropped slots get the index -1, others keep theirs. Probabilities are not renormalised, and slots
// that are -1 stay so. A token whose slots are all dropped gets nothing from the experts.
//
// The capacity is that of the tokens of this rank. There is no derivative: the selection is
// piecewise constant, and a slot without a row gets the gradient 0 for its probability (see
// route.h). The kernel sorts slots by expert, in parallel over chunks, and selects in parallel over
// experts; the result does not depend on the number of threads, and the host learns nothing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Which slots an expert keeps when there are too many.
enum class DropPolicy : uint8_t { probs, position };
std::string_view name_of(DropPolicy policy);

struct ExpertCapacityAttributes {
  int32_t experts = 0;   // E
  int64_t capacity = 0;  // C, at least 1
  DropPolicy policy = DropPolicy::probs;
  int64_t sequence_tokens = 0;  // S, for the policy position; 0: all tokens are one sequence
  int64_t first_token = 0;
};

// What the policy position orders tokens by: the place in the sequence, then the sequence.
struct TokenPlace {
  int64_t place = 0;
  int64_t sequence = 0;
};

// Of token `token` of an operation with these attributes.
inline TokenPlace place_of_token(const ExpertCapacityAttributes& attributes, int64_t token) {
  if (attributes.sequence_tokens == 0) return {.place = token, .sequence = 0};
  const int64_t number = attributes.first_token + token;
  return {.place = number % attributes.sequence_tokens,
          .sequence = number / attributes.sequence_tokens};
}

// ceil(tokens * top_k / experts * factor), at least 1, computed in double in this order as Megatron
// does.
int64_t expert_capacity(int64_t tokens, int64_t top_k, int64_t experts, double factor);

// `probabilities`: [T, k], f32 or f64, only looked at by the policy probs; `indices`: i32 [T, k],
// each in [0, E) or -1. Returns i32 [T, k].
ValueId limit_to_capacity(Builder& builder, ValueId probabilities, ValueId indices,
                          const ExpertCapacityAttributes& attributes, const std::string& name);

// Inputs: probabilities (absent with the policy position), indices. Output: indices.
extern const OpSpec kExpertCapacity;

}  // namespace troupe
