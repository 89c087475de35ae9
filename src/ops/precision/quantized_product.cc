#include "ops/precision/quantized_product.h"

#include <string>

namespace troupe {

void check_quantized_operands(InferContext& context, const char* kind,
                              std::array<bool, 2> transposed, int offsets) {
  const auto attributes = context.attributes<QuantizedProductAttributes>();
  TROUPE_CHECK(is_float(attributes.compute), std::string(kind) + ": compute dtype");
  const int64_t experts = offsets < 0 ? 0 : context.input(offsets).shape[0] - 1;
  for (int i = 0; i < 2; ++i) {
    const Value& codes = context.input(i);
    const Value& scales = context.input(2 + i);
    const auto& operand = attributes.operands[static_cast<size_t>(i)];
    const Shape shape = operand.shape(codes.shape);
    const int64_t of_rows = shape.rank() == 2 ? experts : 0;
    const Shape expected = operand.is_transposed() ? transposed_shape(shape, of_rows) : shape;
    TROUPE_CHECK(operand.is_transposed() == transposed[static_cast<size_t>(i)] &&
                     is_f8(codes.dtype) && codes.shape == expected &&
                     scales.shape == scales_shape(shape, operand.block, of_rows) &&
                     (scales.dtype == DType::f32 || scales.dtype == DType::u8),
                 std::string(kind) + ": codes " + codes.name + " " + codes.shape.to_string() +
                     " of " + shape.to_string() + " in blocks of " + to_string(operand.block) +
                     " with scales " + scales.shape.to_string());
  }
}

std::string print_quantized_product(const Attributes& attributes) {
  const auto& values = attributes.as<QuantizedProductAttributes>();
  return "compute=" + std::string(name_of(values.compute)) +
         " blocks=" + to_string(values.operands[0].block) + "," +
         to_string(values.operands[1].block) + (values.accumulate ? " accumulate=1" : "");
}

Shape quantized_shape(const OpView& op, int operand) {
  const auto& attributes = op.attributes<QuantizedProductAttributes>();
  return attributes.operands[static_cast<size_t>(operand)].shape(op.input(operand).shape);
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
