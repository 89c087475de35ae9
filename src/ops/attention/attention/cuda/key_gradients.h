// Sums of the gradients of keys and values over pieces of queries, for attention_cudnn.cc.
#pragma once

#include <cstdint>

#include "program/cuda_kernel.h"

namespace troupe {

// What a piece contributes: the keys [begin, end) of `batch` sequences. A row is a key's gradients
// for some groups and then its value's.
struct KeyGradientPart {
  const void* rows = nullptr;
  DType dtype = DType::bf16;  // or f16
  int64_t batch = 1;
  int64_t begin = 0;
  int64_t end = 0;
};

// Sums for the same groups, of all positions, of as many sequences. Rows follow each other.
struct KeyGradientSum {
  float* k = nullptr;
  float* v = nullptr;
  int64_t key_elements = 0;  // of a row
  int64_t value_elements = 0;
  int64_t stride = 0;     // elements from row to row
  int64_t positions = 0;  // rows of a sequence
};

// Adds the part to the sums. The first part of a sum makes it: other rows become zero.
void add_key_gradients(const CudaKernelArguments& args, const KeyGradientPart& part,
                       const KeyGradientSum& sum, bool first);

// Rounds the sums of one sequence to d_k and d_v, of bf16 or f16, whose rows are `stride` elements
// apart.
void round_key_gradients(const CudaKernelArguments& args, const KeyGradientSum& sum, DType dtype,
                         void* d_k, void* d_v, int64_t stride);

}  // namespace troupe
