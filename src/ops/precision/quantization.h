// What a quantisation gives: format and scales of the codes, and in which order they lie. Pure
// functions; any thread, and kernels on a GPU.
#pragma once

#include "ops/precision/scale_blocks.h"

namespace troupe {

enum class CodesOrder : uint8_t { rows, transposed, both };

struct QuantizeAttributes {
  DType format = DType::f8e4m3;  // or f8e5m2
  ScaleRule rule = ScaleRule::ratio;
  BlockShape block = {};  // of codes in rows
  CodesOrder order = CodesOrder::rows;
  BlockShape transposed_block = {};  // of transposed codes, not of one row
  bool measures = false;             // gives the largest elements of x, too: the last output
  bool rounds = false;               // x, which is f32, to bf16 first
  bool rotates = false;              // x first: columns of 16 rows (fp4_block.h)
  bool is_stochastic = false;        // codes are drawn; of the rule fp4
  int32_t top_k = 0;                 // not 0: x has tokens, of whose top_k slots each has the rows
  MatrixRows part = {};              // of what matrices x has rows; codes in rows, scales of theirs

  bool has_rows() const { return order != CodesOrder::transposed; }
  bool has_transposed() const { return order != CodesOrder::rows; }
  bool shares_scales() const { return order == CodesOrder::both && block == transposed_block; }
  // Where in the outputs they are.
  int transposed_output() const { return has_rows() ? 2 : 0; }
  int transposed_scales_output() const { return shares_scales() ? 1 : transposed_output() + 1; }
  // Where there are scales of one kind alone.
  int measured_output() const { return order == CodesOrder::both ? 3 : 2; }
  bool operator==(const QuantizeAttributes&) const = default;
};

}  // namespace troupe
