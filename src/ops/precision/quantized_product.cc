#include "ops/precision/quantized_product.h"

#include <string>

namespace troupe {

void check_quantized_operands(InferContext& context, const char* kind, int offsets) {
  const auto attributes = context.attributes<QuantizedProductAttributes>();
  TROUPE_CHECK(is_float(attributes.compute), std::string(kind) + ": compute dtype");
  const int64_t experts = offsets < 0 ? 0 : context.input(offsets).shape[0] - 1;
  for (int i = 0; i < 2; ++i) {
    const Value& codes = context.input(i);
    const Value& scales = context.input(2 + i);
    const BlockShape block = attributes.blocks[static_cast<size_t>(i)];
    const Shape expected = scales_shape(codes.shape, block, codes.shape.rank() == 2 ? experts : 0);
    TROUPE_CHECK(is_f8(codes.dtype) && scales.shape == expected &&
                     (scales.dtype == DType::f32 || scales.dtype == DType::u8),
                 std::string(kind) + ": codes " + codes.name + " " + codes.shape.to_string() +
                     " in blocks of " + to_string(block) + " with scales " +
                     scales.shape.to_string());
  }
}

std::string print_quantized_product(const Attributes& attributes) {
  const auto& values = attributes.as<QuantizedProductAttributes>();
  return "compute=" + std::string(name_of(values.compute)) +
         " blocks=" + to_string(values.blocks[0]) + "," + to_string(values.blocks[1]) +
         (values.accumulate ? " accumulate=1" : "");
}

double quantized_operand_bytes(const OpView& op) {
  uint64_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes += op.input(i).bytes();
  return static_cast<double>(bytes);
}

DType quantized_sum_dtype(const OpView& op) {
  return accumulation_dtype(op.attributes<QuantizedProductAttributes>().compute);
}

}  // namespace troupe
