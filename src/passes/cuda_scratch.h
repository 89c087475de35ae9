// The private memory of a CUDA kernel: of the block of its queue (MemoryPlan), from the beginning.
// Pure function; any thread.
#pragma once

#include <cstdint>

#include "program/program.h"

namespace troupe {

// `staging` lies after what is the kernel's own. Both are multiples of MemoryPlan::kAlignment.
struct CudaScratch {
  uint64_t own = 0;
  uint64_t staging = 0;
  uint64_t bytes() const { return own + staging; }
};
CudaScratch cuda_scratch_of(const OpView& view);

}  // namespace troupe
