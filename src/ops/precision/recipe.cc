#include "ops/precision/recipe.h"

namespace troupe {

QuantizeAttributes quantization_of(const QuantizedForm::Operand& operand, Fp8Recipe recipe,
                                   Fp8Format format) {
  using Kind = QuantizedForm::Operand::Kind;
  const auto along_sum = [&](int32_t size) {
    return operand.sums_columns ? BlockShape{1, size} : BlockShape{size, 1};
  };
  const bool is_weight = operand.kind == Kind::weight;
  const bool wide_range = operand.kind == Kind::gradient && format == Fp8Format::hybrid;
  const DType codes = wide_range ? DType::f8e5m2 : DType::f8e4m3;
  switch (recipe) {
    case Fp8Recipe::none:
      break;
    case Fp8Recipe::tensorwise:
      return {codes, ScaleRule::ratio, {}};
    case Fp8Recipe::blockwise:
      return {codes, ScaleRule::power_of_two, is_weight ? BlockShape{128, 128} : along_sum(128)};
    case Fp8Recipe::mxfp8:
      return {codes, ScaleRule::exponent, along_sum(32)};
  }
  TROUPE_CHECK(false, "a recipe of low precision");
  return {};
}

}  // namespace troupe
