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
  struct Operand {
    BlockShape block = {};  // of elements that share a scale
    // Where its codes are transposed (ops/precision/scale_blocks.h): the rows of a matrix, and the
    // number of matrices of [E, N, K]. Otherwise 0.
    int64_t rows = 0;
    int64_t matrices = 0;

    bool is_transposed() const { return rows > 0; }
    // Its shape before it was quantised, by that of its codes.
    Shape shape(const Shape& codes) const {
      if (!is_transposed()) return codes;
      return matrices > 0 ? Shape{matrices, rows, codes[1]} : Shape{rows, codes[1]};
    }
  };
  // Of transposed codes of a tensor of that shape.
  static Operand transposed(BlockShape block, const Shape& shape) {
    const bool matrices = shape.rank() == 3;
    return {block, shape[matrices ? 1 : 0], matrices ? shape[0] : 0};
  }

  DType compute = DType::bf16;  // of the result; of weight gradients that of the weight
  bool accumulate = false;      // weight gradients: add to the target
  std::array<Operand, 2> operands = {};
};

// For shape rules: checks codes and scales of both operands, and whether they are transposed as
// the product needs them. `offsets`: the input with the experts' first
// rows; -1: none.
void check_quantized_operands(InferContext& context, const char* kind,
                              std::array<bool, 2> transposed, int offsets);

// "compute=bf16 blocks=1x128,128x128"
std::string print_quantized_product(const Attributes& attributes);

// The shape of an operand before it was quantised.
Shape quantized_shape(const OpView& op, int operand);

double quantized_operand_bytes(const OpView& op);

// The type of the sums.
DType quantized_sum_dtype(const OpView& op);

}  // namespace troupe
