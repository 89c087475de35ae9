// The kinds of parameters, and the part of one that a rank holds: geometry, without the layout that
// decides it (parameter_layout.h) and the state that stores it (parameters.h).
//
// Pure functions and plain values; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/shape.h"
#include "parallel/layout.h"
#include "program/shard.h"

namespace troupe {

enum class ParameterKind : uint8_t {
  embedding,                 // [vocab, hidden]
  input_norm,                // [hidden]
  input_norm_bias,           // [hidden], with LayerNorm
  w_qkv,                     // [(heads + 2 groups) d, hidden]: query heads, key heads, value heads
  b_qkv,                     // [(heads + 2 groups) d]
  q_norm,                    // [d]; over the whole projection: [heads d]
  k_norm,                    // [d]; over the whole projection: [groups d]
  w_attention_out,           // [hidden, heads d]
  b_attention_out,           // [hidden]
  post_attention_norm,       // [hidden]
  post_attention_norm_bias,  // [hidden], with LayerNorm
  w_router,                  // [experts, hidden]
  b_router,                  // [experts]
  // The first product: gate rows before linear rows; `rows` is mlp_rows(width).
  w_gate_up,         // dense: [rows, hidden]; experts: [experts, rows, hidden]
  b_gate_up,         // dense: [rows]; experts: [experts, rows]
  w_down,            // dense: [hidden, ffn]; experts: [experts, hidden, ffn]
  b_down,            // dense: [hidden]; experts: [experts, hidden]
  w_shared_gate_up,  // [rows, hidden]
  w_shared_down,     // [hidden, width]
  w_shared_gate,     // [1, hidden]
  final_norm,        // [hidden]
  final_norm_bias,   // [hidden], with LayerNorm
  head,              // [vocab, hidden]
};

// The part of a parameter that one rank holds: in each dimension the indices of its ranges, one
// range after the other.
struct ParameterSlice {
  std::vector<std::vector<IndexRange>> ranges;  // by dimension
  GradientClass gradient = GradientClass::sliced;

  int64_t extent(int dimension) const;
  int64_t elements() const;
};

// A piece of a slice that is one stretch of the rank's memory and a box of the whole tensor.
struct SlicePiece {
  std::array<int64_t, Shape::kMaxRank> offset{};  // of the box in the whole tensor
  Shape shape;                                    // of the box
  int64_t first = 0;                              // its first element in the slice
};

// The slice as few pieces, in the order of the rank's memory.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice);

// What the shard has of the slice, as few pieces. `first` counts from the shard's first element.
std::vector<SlicePiece> pieces_of(const ParameterSlice& slice, const IndexRange& shard);

// A stretch of a slice that is one stretch of the whole tensor, too, in row-major order.
struct SliceRun {
  int64_t whole = 0;  // its first element in the whole tensor
  int64_t own = 0;    // and in the slice
  int64_t elements = 0;
};

// The slice of a tensor of shape `whole` as few such stretches, ascending in both orders.
std::vector<SliceRun> runs_of(const ParameterSlice& slice, const Shape& whole);

// What lies in elements `part` of the slice; `own` counts in the slice, as before.
std::vector<SliceRun> runs_within(std::vector<SliceRun> runs, const IndexRange& part);

}  // namespace troupe
