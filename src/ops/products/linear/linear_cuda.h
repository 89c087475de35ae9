// Gradients of a router's logits on a GPU: dy is f32 and the other operand bf16. For tensor cores
// each dy is written as the sum of three bf16 numbers, which is exact to 2^-26 of it (an infinity
// becomes NaN): the first is dy rounded, the others are what is missing. With the three side by
// side, [T, 3 N], both gradients are products of bf16 with sums in f32, as they are with plain
// arithmetic.
//
// Where they lie is shared by the kernels and by the rule that books their memory. Pure functions.
// Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "ops/product_scratch.h"

namespace troupe {

inline constexpr int64_t kSplitParts = 3;

inline bool is_split(DType dy, DType other) {
  return dy == DType::f32 && other == DType::bf16;
}

// Scratch memory after that of the products: the parts of dy, then `second`: W three times, or the
// weight gradient of each part.
struct SplitScratch {
  SplitScratch(int64_t rows, int64_t outputs, int64_t inputs)
      : second_offset(align(rows * kSplitParts * outputs * int64_t{sizeof(bf16)})),
        bytes(second_offset + align(kSplitParts * outputs * inputs * int64_t{sizeof(float)})) {}
  static int64_t align(int64_t size) {
    return static_cast<int64_t>(align_scratch(static_cast<uint64_t>(size)));
  }

  // Type: of the parts, a bf16.
  template <class Type>
  Type* parts(std::byte* scratch) const {
    return reinterpret_cast<Type*>(scratch + kProductScratchBytes);
  }
  template <class Type>
  Type* second(std::byte* scratch) const {
    return reinterpret_cast<Type*>(scratch + kProductScratchBytes + second_offset);
  }

  int64_t second_offset;
  int64_t bytes;
};

}  // namespace troupe
