// Linear map of each head by itself: the products that take queries of multi-head latent attention
// to the space of the latent, and its results from there to values ("absorbed" weights;
// DeepSeek-V2, 2024, section 2.1.2).
//
// The weight W [H w, K] has w rows for each of H heads. The map uses n of them, from row `first` of
// the head on: W_h [n, K]. Of each head h apart
//   y_h = x_h W_h^T                with x [T, H K] and y [T, H n], or, transposed,
//   y_h = x_h W_h                  with x [T, H n] and y [T, H K]
// All of one dtype, not ragged; sums are in the accumulation type, each result is rounded once.
//
// Kinds
//   head_linear (x, W) -> y         the gradient of x is the same map of dy, transposed or not
//   head_linear_weight_gradient (r [T, H n], c [T, H K], target optional) -> dW [H w, K]
//       (+)= of each head r_h^T c_h in the rows that the map uses, and nothing in the others.
//       dtypes as of ops/products/linear.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct HeadLinearAttributes {
  int32_t heads = 1;  // H
  int32_t first = 0;
  int32_t rows = 1;  // n
  bool transposed = false;
};

struct HeadLinearWeightGradientAttributes {
  int32_t heads = 1;
  int32_t first = 0;
  int32_t rows = 1;
  int32_t head_rows = 1;  // w
  bool accumulate = false;
};

ValueId head_linear(Builder& builder, ValueId x, ValueId weight,
                    const HeadLinearAttributes& attributes, const std::string& name);

extern const OpSpec kHeadLinear;
extern const OpSpec kHeadLinearWeightGradient;

}  // namespace troupe
