// Exchange of heads: the ranks of a group that share each sequence change over to sharing the
// heads, and back, so that attention in between sees whole sequences (DeepSpeed Ulysses: Jacobs et
// al., 2023).
//
// A row belongs to one token and holds H query heads, then G key heads, of d elements each, then G
// value heads of e elements; H or G may be 0. With n ranks, each has either its chunks of every
// sequence (program/row_origin.h) and all heads, or all positions of every sequence, in order, and
// of each of the three kinds of heads the rank's share: n equal consecutive ones.
//
// Kinds (w = (H + G) d + G e; B sequences of S)
//   sequence_to_heads (x [B S / n, w])   -> y [B S, w / n]
//   heads_to_sequence (y [B S, w / n])   -> x [B S / n, w]
// Any float dtype, not ragged; elements only move. Each is the other's inverse and derivative.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct ExchangeHeadsAttributes {
  RankGroup group = RankGroup::cp;
  SequenceChunks chunks = {};  // n and the rank
  int32_t batch = 1;           // B
  int32_t sequence = 1;        // S
  int32_t heads = 1;           // H, a multiple of n
  int32_t groups = 0;          // G, a multiple of n
  int32_t head_dim = 1;        // d
  int32_t value_dim = 0;       // e; 0: d

  constexpr int32_t value_size() const { return value_dim == 0 ? head_dim : value_dim; }
  // Elements of a row that has all heads.
  constexpr int64_t row() const {
    return int64_t{heads + groups} * head_dim + int64_t{groups} * value_size();
  }
};

// Emit the collectives on the group's queue.
ValueId sequence_to_heads(Builder& builder, ValueId x, const ExchangeHeadsAttributes& attributes,
                          const std::string& name);
ValueId heads_to_sequence(Builder& builder, ValueId y, const ExchangeHeadsAttributes& attributes,
                          const std::string& name);

extern const OpSpec kSequenceToHeads;
extern const OpSpec kHeadsToSequence;

}  // namespace troupe
