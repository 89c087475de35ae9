// Quantisation in one pass: a block of threads takes a tile of 128 x 128 elements, finds the scales
// of blocks that lie within it, and stores the codes in rows, transposed, or both. One scale for a
// whole matrix has to be known before. For x in bf16 or f32 with rows of whole packs. Codes that
// are there are transposed in the same tiles. Any thread; what takes CudaKernelArguments needs a
// GPU.
#pragma once

#include "program/cuda_kernel.h"

namespace troupe {

// What elements are multiplied by, of each matrix or expert, where its scale is one, which is
// stored; otherwise null. They are in the scratch memory of a run of quantize.
const float* tile_factors(const CudaKernelArguments& args);

// Stores codes, and scales where they are the tiles'.
void quantize_tiles(const CudaKernelArguments& args, const float* factors);

// Codes in rows, input 0, to transposed codes, output 0.
void transpose_tiles(const CudaKernelArguments& args);

}  // namespace troupe
