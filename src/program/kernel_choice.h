// Which CUDA kernel an operation gets: what OpSpec::cuda answers, from shapes, dtypes, attributes
// and the traits of a GPU alone. It asks no GPU, so plans can be made where there is none; only the
// function is missing in builds without CUDA. ops/choose_kernel.h helps to answer.
//
// Plain values.
#pragma once

#include <cstdint>

#include "program/cuda_kernel.h"

namespace troupe {

// Private memory of one run of a kernel, in bytes.
struct KernelNeeds {
  uint64_t scratch = 0;
  // Of a collective whose group is staged (Program::staged_groups): room for what others send.
  uint64_t staging = 0;
};

// Why an operation has not got the kernel that is fast on this kind of GPU.
enum class SlowKernel : uint8_t {
  no,                  // it has, or there is none
  dtype,               // operands that the fast kernel does not take
  mixed_dtypes,        // operands, or a result, of dtypes that it does not combine
  bias_dtype,          // a bias of another dtype than the result, or in f64
  head_size,           // of attention
  dropout,             // within attention
  documents,           // attention within documents
  one_query,           // chunks of a single query
  row_bytes,           // rows that are no multiple of 16 bytes
  row_codes,           // rows in 8 bits that are no multiple of 16 codes
  block_scales,        // codes with scales of blocks: multiplied as wide numbers
  four_bits,           // codes of 4 bits: multiplied in fp32
  compute_capability,  // another GPU than the fast kernel is for
};

struct KernelChoice {
  CudaKernel function = nullptr;  // nullptr: the build has no CUDA, or there is no kernel yet
  // Names the kernel among those of the operation's kind; the kind's own name where it is the only
  // one. A constant of the program.
  const char* variant = nullptr;
  SlowKernel slow = SlowKernel::no;
  KernelNeeds needs;
  // That the kernel sizes its grids for: all, or of those that keep to it Op::multiprocessors.
  int32_t multiprocessors = 0;
};

}  // namespace troupe
