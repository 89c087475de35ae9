// Which quantisations go through tiles of 128 x 128 elements (quantize_tiles.h). Pure functions;
// any thread, in every build.
#pragma once

#include "ops/precision/quantization.h"
#include "program/cuda_kernel.h"

namespace troupe {

// Which scales a tile has.
enum class TileScales : uint8_t {
  none,     // they do not lie so
  whole,    // that of its matrix
  lines,    // one for each row of codes in rows, one for each column of transposed codes
  squares,  // one
};

constexpr TileScales tile_scales(const QuantizeAttributes& attributes) {
  constexpr int32_t kSide = kTransposedRows;
  const auto all_are = [&](BlockShape rows, BlockShape transposed) {
    return (!attributes.has_rows() || attributes.block == rows) &&
           (!attributes.has_transposed() || attributes.transposed_block == transposed);
  };
  if (attributes.rule == ScaleRule::exponent || attributes.rule == ScaleRule::fp4) {
    return TileScales::none;
  }
  if (all_are({}, {})) return TileScales::whole;
  if (all_are({1, kSide}, {kSide, 1})) return TileScales::lines;
  if (all_are({kSide, kSide}, {kSide, kSide})) return TileScales::squares;
  return TileScales::none;
}

// Whether a quantisation of x (a Value or a CudaTensor) goes through tiles. Codes in rows alone
// with one scale need none.
template <class Tensor>
bool quantizes_tiles(const QuantizeAttributes& attributes, const Tensor& x) {
  const TileScales scales = tile_scales(attributes);
  return (x.dtype == DType::bf16 || x.dtype == DType::f32) && !attributes.part.any() &&
         is_made_of_packs(x.shape.back(), x.dtype) && scales != TileScales::none &&
         (attributes.has_transposed() || scales == TileScales::lines);
}

}  // namespace troupe
