#include "ops/precision/cuda/quantize_tiles.h"
#include "ops/precision/transpose_codes/transpose_codes.h"

namespace troupe {

CudaKernel transpose_codes_cuda_kernel(const OpView&) {
  return &transpose_tiles;
}

}  // namespace troupe
