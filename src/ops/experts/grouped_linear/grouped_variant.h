// Which of the kernels for Hopper's tensor cores a product of experts gets.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace troupe {

enum class GroupedProduct : uint8_t {
  forward,          // y [R, N] = x [R, K] W^T, W [E, N, K]
  data_gradient,    // dx [R, N] = dy [R, K] W, W [E, K, N]
  weight_gradient,  // dW [E, M, N] = dy^T x, dy [R, M], x [R, N]
};

enum class GroupedVariant : uint8_t {
  plain,      // the tiles of product.cuh, for any dtype
  sm90,       // grouped_product_sm90.cuh
  sm90_pair,  // the same, in pairs of blocks that share tiles
};

// sm90 or sm90_pair, for groups whose results have that many rows on average.
GroupedVariant tiled_variant(int64_t rows_of_group);

// Whether the rows of a tensor of `dtype` can be copied in tiles and counted in 32 bits.
bool has_tiled_rows(const Shape& shape, DType dtype);
// Whether those of both operands and the result can, all of that dtype: what
// grouped_product_sm90.cuh takes.
bool has_tiled_operands(const OpView& op, DType dtype);

// Of rows that belong to experts: those of a group on average, as far as is known.
int64_t expected_rows_of_group(const Value& rows, int64_t experts);

}  // namespace troupe
