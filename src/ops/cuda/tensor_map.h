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

// Whether rows of `elements` can be copied in tiles.
bool has_tiled_rows(int64_t elements, DType dtype);

// Throws UserError (failed) when the driver refuses; that it can be asked is checked here, too.
CUtensorMap make_tensor_map(const TiledTensor& tensor);

}  // namespace troupe
