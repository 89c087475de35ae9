#include "ops/precision/recipe.h"

#include "ops/precision/fp4_block.h"

namespace troupe {

namespace {

// The blocks of an operand in the order in which its product reads it.
BlockShape block_of(const QuantizedForm::Operand& operand, Fp8Recipe recipe) {
  const auto along_sum = [&](int32_t size) {
    return operand.sums_columns ? BlockShape{1, size} : BlockShape{size, 1};
  };
  switch (recipe) {
    case Fp8Recipe::none:
      break;
    case Fp8Recipe::tensorwise:
    case Fp8Recipe::delayed:
      return {};
    case Fp8Recipe::blockwise:
      if (operand.kind == QuantizedForm::Operand::Kind::weight) return {128, 128};
      return along_sum(128);
    case Fp8Recipe::mxfp8:
      return along_sum(32);
    case Fp8Recipe::nvfp4:
      if (operand.kind == QuantizedForm::Operand::Kind::weight) return {kFp4Block, kFp4Block};
      return along_sum(kFp4Block);
  }
  TROUPE_CHECK(false, "a recipe of low precision");
  return {};
}

ScaleRule rule_of(Fp8Recipe recipe) {
  switch (recipe) {
    case Fp8Recipe::blockwise:
      return ScaleRule::power_of_two;
    case Fp8Recipe::mxfp8:
      return ScaleRule::exponent;
    case Fp8Recipe::nvfp4:
      return ScaleRule::fp4;
    default:
      return ScaleRule::ratio;
  }
}

}  // namespace

QuantizeAttributes quantization_of(const QuantizedForm::Operand& operand, Fp8Recipe recipe,
                                   Fp8Format format) {
  const bool wide_range =
      operand.kind == QuantizedForm::Operand::Kind::gradient && format == Fp8Format::hybrid;
  QuantizeAttributes attributes;
  attributes.format = wide_range ? DType::f8e5m2 : DType::f8e4m3;
  attributes.rule = rule_of(recipe);
  if (operand.sums_columns) {
    attributes.block = block_of(operand, recipe);
  } else {
    attributes.order = CodesOrder::transposed;
    attributes.transposed_block = block_of(operand, recipe);
  }
  if (recipe == Fp8Recipe::nvfp4) {
    // Both operands of a weight gradient.
    attributes.rotates =
        !operand.sums_columns && operand.kind != QuantizedForm::Operand::Kind::weight;
    attributes.is_stochastic = operand.kind == QuantizedForm::Operand::Kind::gradient;
  }
  return attributes;
}

QuantizeAttributes in_both_orders(const QuantizeAttributes& one, const QuantizeAttributes& other) {
  TROUPE_CHECK(one.format == other.format && one.rule == other.rule,
               "quantisations that differ in more than their order");
  if (one.order == other.order) return one;
  QuantizeAttributes both = one;
  both.order = CodesOrder::both;
  if (!one.has_rows()) both.block = other.block;
  if (!one.has_transposed()) both.transposed_block = other.transposed_block;
  return both;
}

}  // namespace troupe
