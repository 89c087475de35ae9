// Quantisation in one pass: a block of threads takes a tile of 128 x 128 elements, finds the scales
// of blocks that lie within it, and stores the codes in rows, transposed, or both. One scale for a
// whole matrix has to be known before. For x in bf16 or f32 with rows of whole packs. Codes that
// are there are transposed in the same tiles. Any thread; what takes CudaKernelArguments needs a
// GPU.
#pragma once

#include "ops/precision/quantization.h"
#include "program/cuda_kernel.h"
#include "program/op_spec.h"

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

// Whether a quantisation goes through tiles. Codes in rows alone with one scale need none.
inline bool quantizes_tiles(const OpView& op) {
  const auto& attributes = op.attributes<QuantizeAttributes>();
  const TileScales scales = tile_scales(attributes);
  const Value& x = op.input(0);
  return (x.dtype == DType::bf16 || x.dtype == DType::f32) && !attributes.part.any() &&
         is_made_of_packs(x.shape.back(), x.dtype) && scales != TileScales::none &&
         (attributes.has_transposed() || scales == TileScales::lines);
}

// Stores codes, and scales where they are the tiles'. `factors`: what elements are multiplied by,
// of each matrix or expert, where its scale is one; otherwise null.
void quantize_tiles(const CudaKernelArguments& args, const float* factors);

// Codes in rows, input 0, to transposed codes, output 0.
void transpose_tiles(const CudaKernelArguments& args);

}  // namespace troupe
