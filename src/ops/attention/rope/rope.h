// Rotary position embedding (Su et al., RoFormer, 2021) of the query and key heads of a fused
// projection.
//
// The table holds, for position p and pair i < r / 2 with r = rotary_dim and the frequency f_i of
// rope_frequencies.h,
//   angle = p f_i,  table[p, i] = concentration (cos angle, sin angle)
// computed in double and rounded to the table's dtype. Where ranks share each sequence, the table
// has the positions of this rank's rows instead, in their order: entry p is that of
// chunks.position(p, positions).
//
// A row of qkv holds H query heads, then G key heads, then G value heads, each of d elements; G may
// be 0. Row t has position p = t mod sequence. In each query and key head r elements turn, from
// element `first` on; of the pair i < r / 2 of them (a, b)
//   a' = a cos - b sin
//   b' = b cos + a sin
// (sin with the other sign when `inverse`). A pair is (i, i + r / 2) of the r elements, as in
// Hugging Face ("rotate_half"), or (2 i, 2 i + 1) if `interleaved`, as in multi-head latent
// attention. The other elements and the value heads are copied. Arithmetic is in the accumulation
// type, rounded once.
//
// Kinds (T rows, w = (H + 2 G) d; qkv may be ragged)
//   rope_table ()                                       -> table [positions, r / 2, 2]
//   rope (qkv [T, w], table in the accumulation dtype)  -> y [T, w]; may be stored over qkv
// The derivative of rope is rope with `inverse` flipped; the table has no gradient.
#pragma once

#include <string>

#include "ops/attention/rope/rope_frequencies.h"
#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct RopeTableAttributes {
  int32_t positions = 0;
  int32_t rotary_dim = 0;
  double base = 10000;
  RopeScaling scaling = {};
  DType dtype = DType::f32;  // set by rope_table()
  SequenceChunks chunks = {};

  bool operator==(const RopeTableAttributes&) const = default;
};

struct RopeAttributes {
  int32_t heads = 0;   // H
  int32_t groups = 0;  // G
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;  // r, even
  int32_t first = 0;       // first + r is at most head_dim
  bool interleaved = false;
  int32_t sequence = 0;  // positions repeat after this many rows
  bool inverse = false;
};

// Do the GPU's kernels move packs: where these never cross from what turns to what does not.
// `width`: of a row.
bool rotates_packs(const RopeAttributes& attributes, int64_t width, DType dtype);

// Emits the table of cosines and sines in `dtype`, the accumulation dtype of the tensors it will
// turn. One table serves all layers.
ValueId rope_table(Builder& builder, RopeTableAttributes attributes, DType dtype,
                   const std::string& name);

// Emits the rotation of the query and key heads of `qkv`; returns the new rows. The table needs at
// least `sequence` positions.
ValueId rope(Builder& builder, ValueId qkv, ValueId table, const RopeAttributes& attributes,
             const std::string& name);

extern const OpSpec kRopeTable;
extern const OpSpec kRope;

}  // namespace troupe
