// The speed that this machine's matrix products reach at best: what "% of limit" refers to.
#pragma once

#include "base/device.h"
#include "base/dtype.h"
#include "base/thread_pool.h"

namespace troupe {

// Floating-point operations per second of a large matrix product, on all threads of the pool or on
// the GPU, measured now (takes about a tenth of a second). bf16 computes in fp32 on the CPU.
double measure_matmul_limit(DType compute_dtype, ThreadPool& pool, Device device = Device::cpu);

}  // namespace troupe
