// What products of operands in 8 bits have in common (quantized_linear, quantized_grouped_linear).
//
// Inputs 0 and 1 are codes, 2 and 3 their scales (ops/precision/quantize). The product is that of
// the numbers which they stand for,
//
//   code * scale, in the accumulation type of the compute dtype
//
// which is exact in f64, and in f32 where scales are powers of two. Sums are in the accumulation
// type over the whole reduction, and rounded once. Tensor cores multiply codes and sum 128 products
// in fewer bits; those sums are added in f32, and multiplied by the scales at the end.
#pragma once

#include <array>

#include "ops/precision/quantize/quantize.h"
#include "program/op_spec.h"

namespace troupe {

struct QuantizedProductAttributes {
  DType compute = DType::bf16;            // of the result; of weight gradients that of the weight
  bool accumulate = false;                // weight gradients: add to the target
  std::array<BlockShape, 2> blocks = {};  // of inputs 0 and 1
};

// For shape rules: checks codes and scales of both operands. `offsets`: the input with the experts'
// first rows; -1: none.
void check_quantized_operands(InferContext& context, const char* kind, int offsets);

// "compute=bf16 blocks=1x128,128x128"
std::string print_quantized_product(const Attributes& attributes);

double quantized_operand_bytes(const OpView& op);

// The type of the sums.
DType quantized_sum_dtype(const OpView& op);

}  // namespace troupe
