// What the GPU can do at best, for steps and operations to be compared with. Both functions take
// some tenths of a second and up to a gigabyte of its memory, and throw UserError when the GPU
// fails; in builds without CUDA neither may be called.
#pragma once

#include "base/dtype.h"

namespace troupe {

// Floating-point operations per second of a large matrix product by cuBLASLt, on random numbers: on
// zeros a GPU is faster than it can be in earnest.
double measure_device_matmul_limit(DType dtype);

// Bytes per second of copying within the GPU's memory, read and write counted.
double measure_device_copy_limit();

}  // namespace troupe
