// Recipes: how the operands of a product become 8 bits (docs/low_precision.md).
//
// Pure functions; any thread.
#pragma once

#include "ops/precision/quantize/quantize.h"
#include "program/op_spec.h"

namespace troupe {

enum class Fp8Recipe : uint8_t {
  none,
  tensorwise,  // one scale for a tensor, for each expert of it; f32
  delayed,     // the same, by what was largest in the steps before
  blockwise,   // for 1 x 128 along the sum, weights 128 x 128; powers of two
  mxfp8,       // for 1 x 32 along the sum; powers of two in 8 bits
  nvfp4,       // codes of 4 bits for 1 x 16 along the sum, weights 16 x 16 (fp4_block.h)
};
// What of a history `delayed` takes.
enum class AmaxChoice : uint8_t { most_recent, max };
enum class Fp8Format : uint8_t {
  e4m3,    // of all codes
  hybrid,  // e5m2 of gradients
};

// An operand of the linear map of a parameter, which reads it itself or by one of its gradients.
struct MapOperand {
  StateId parameter;
  int32_t kind = 0;      // QuantizedForm::Operand::Kind
  bool experts = false;  // there is one for each expert
  bool operator==(const MapOperand&) const = default;
};

// In the order in which the operand's product reads it. Of a recipe, not of `none`.
QuantizeAttributes quantization_of(const QuantizedForm::Operand& operand, Fp8Recipe recipe,
                                   Fp8Format format);

// One quantisation in place of two of the same tensor.
QuantizeAttributes in_both_orders(const QuantizeAttributes& one, const QuantizeAttributes& other);

}  // namespace troupe
