// Join rotated: heads put together of a part that stays and a part that turns with its position, as
// queries and keys of multi-head latent attention are in the space of the latent (DeepSeek-V2,
// 2024, section 2.1.3).
//
// Of each of G heads
//   y = (n elements of a, r elements of b, turned)
// Turning is that of ops/attention/rope/rope.h with its table, row t at position t mod sequence, of
// pairs (2 i, 2 i + 1) of the r elements if `interleaved`, else (i, i + r / 2). Arithmetic is in
// the accumulation type, rounded once.
//
// Kinds (T rows; not ragged)
//   join_rotated (a [T, G n], b [T, G r], table in the accumulation dtype) -> y [T, G (n + r)]
//   join_rotated_gradient (dy, table) -> d_a, d_b: turned back
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct JoinRotatedAttributes {
  int32_t heads = 1;       // G
  int32_t plain_dim = 1;   // n
  int32_t rotary_dim = 0;  // r, even
  int32_t sequence = 0;    // positions repeat after this many rows
  bool interleaved = false;

  constexpr int32_t head_dim() const { return plain_dim + rotary_dim; }
};

// Do the GPU's kernels move packs: where these never cross from one part of a head to the other,
// nor from one half of the pairs.
bool joins_packs(const JoinRotatedAttributes& attributes, DType dtype);

// The table is a rope_table of rotary_dim, of at least `sequence` positions.
ValueId join_rotated(Builder& builder, ValueId plain, ValueId turning, ValueId table,
                     const JoinRotatedAttributes& attributes, const std::string& name);

extern const OpSpec kJoinRotated;
extern const OpSpec kJoinRotatedGradient;

}  // namespace troupe
