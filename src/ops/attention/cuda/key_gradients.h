// Sums of the gradients of keys and values over blocks of queries, for attention_cudnn.cc. Of one
// sequence; a row is a token's keys and values of some groups, `key_elements` of each.
#pragma once

#include <cstdint>

#include "program/cuda_kernel.h"

namespace troupe {

struct KeyGradientSum {
  int64_t key_elements = 0;  // of a row: groups times the size of a head
  float* sum = nullptr;      // [sequence, 2 key_elements]
  bf16* part = nullptr;      // [sequence, 2 key_elements]: what one block of queries contributes
};

// Adds the part's first rows to the rows [begin, end) of the sum; those from `first_new` on are
// stored.
void add_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sums, int64_t begin,
                       int64_t end, int64_t first_new);

// Rounds all rows of the sum to d_k and d_v, whose rows are `stride` elements apart.
void round_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sums,
                         int64_t sequence, bf16* d_k, bf16* d_v, int64_t stride);

}  // namespace troupe
