// Transposes of codes in 8 bits on a GPU: tensor cores multiply codes only with the depth of a
// product within the rows of both operands. One thread at a time. Only in builds with CUDA.
#pragma once

#include <cstdint>

#include "program/cuda_kernel.h"

namespace troupe {

// codes [matrices, rows, columns] -> out [matrices, columns, rows]; rows and columns are multiples
// of 16.
void transpose_matrices(const CudaKernelArguments& args, const void* codes, int64_t matrices,
                        int64_t rows, int64_t columns, void* out);

// codes [rows, columns], whose rows belong to groups -> out [columns, padded_columns(rows, groups)]
// as grouped_product_sm90.cuh has it: with zeros after each group's rows, up to a multiple of
// kCodePadding. What is between them is not written. columns is a multiple of 16.
void transpose_groups(const CudaKernelArguments& args, const void* codes, const int32_t* offsets,
                      int64_t groups, int64_t rows, int64_t columns, void* out);

}  // namespace troupe
