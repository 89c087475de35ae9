// Descriptions of tensors from which Hopper's TMA reads and writes tiles (sm90.cuh).
// Any thread. Only in builds with CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <cuda.h>

#include "base/dtype.h"

namespace troupe {

// A tensor of three dimensions, innermost first, without gaps between its elements, rows and
// matrices. Tiles are `tile` elements wide and high and one matrix deep; their rows of 128 bytes
// lie swizzled in shared memory.
struct TiledTensor {
  const void* data = nullptr;  // a multiple of 16 bytes
  DType dtype = DType::bf16;
  std::array<int64_t, 3> sizes{};  // a row's bytes are a multiple of 16
  std::array<int32_t, 2> tile{};   // 128 bytes wide; at most 256 high
};

// Heads of bf16 in rows of several, of sequences that follow each other. Tiles are 64 elements of
// one head, of some rows of one sequence; what lies beyond the head or the sequence arrives as
// zeros. Their coordinates: element, head, row, sequence. Their rows lie swizzled in shared memory.
struct TiledHeads {
  const void* data = nullptr;  // a multiple of 16 bytes
  int64_t head_dim = 0;        // a multiple of 8
  int64_t heads = 0;
  int64_t rows = 0;  // of a sequence
  int64_t sequences = 0;
  int64_t row_stride = 0;  // elements from row to row, a multiple of 8
  int32_t tile_rows = 0;   // at most 256
};

// Whether rows of `elements` can be copied in tiles.
bool has_tiled_rows(int64_t elements, DType dtype);

// Throws UserError (failed) when the driver refuses; that it can be asked is checked here, too.
CUtensorMap make_tensor_map(const TiledTensor& tensor);
CUtensorMap make_tensor_map(const TiledHeads& heads);

}  // namespace troupe
