// Which of the kernels for Hopper's tensor cores a product of experts gets.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace troupe {

enum class GroupedVariant : uint8_t {
  plain,      // the tiles of product.cuh, for any dtype
  sm90,       // grouped_product_sm90.cuh
  sm90_pair,  // the same, in pairs of blocks that share tiles
};

// sm90 or sm90_pair, for groups whose results have that many rows on average.
GroupedVariant tiled_variant(int64_t rows_of_group);

// Whether the rows of both operands and the result, of `dtype`, can be copied in tiles and counted
// in 32 bits: what grouped_product_sm90.cuh takes.
bool has_tiled_operands(const OpView& op, DType dtype);

// Of rows that belong to experts: those of a group on average, as far as is known.
int64_t expected_rows_of_group(const Value& rows, int64_t experts);

}  // namespace troupe
