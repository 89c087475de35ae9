#include "ops/attention/gated_delta_rule/delta_attributes.h"

#include <fmt/format.h>
#include <vector>

namespace troupe {

void check_delta_rule(const InferContext& context, int first) {
  const auto& a = context.attributes<GatedDeltaRuleAttributes>();
  const Value& qkv = context.input(first);
  TROUPE_CHECK(a.sequence > 0 && a.key_heads > 0 && a.key_dim > 0 && a.value_dim > 0 &&
                   a.value_heads >= a.key_heads && a.value_heads % a.key_heads == 0,
               "gated_delta_rule: sizes");
  TROUPE_CHECK(is_float(qkv.dtype) && qkv.shape.rank() == 2 && qkv.shape[1] == a.row_size() &&
                   qkv.shape[0] % a.sequence == 0 && !qkv.rows.valid(),
               "gated_delta_rule: " + qkv.name + " " + qkv.shape.to_string());
  const int64_t rows = qkv.shape[0];
  const Value& gates = context.input(first + 1);
  TROUPE_CHECK(gates.dtype == accumulation_dtype(qkv.dtype) &&
                   gates.shape == Shape({rows, 2 * int64_t{a.value_heads}}),
               "gated_delta_rule: " + gates.name + " " + gates.shape.to_string());
  if (!context.has_input(first + 2)) return;
  const Value& starts = context.input(first + 2);
  TROUPE_CHECK(starts.dtype == DType::i32 && starts.shape == Shape({rows}),
               "gated_delta_rule: starts is not i32 [T]: " + starts.name);
}

// The states, the gradient of one; of each row normed query and key, their factors and gradients.
uint64_t delta_gradient_cpu_scratch(const GatedDeltaRuleAttributes& attributes, int64_t columns,
                                    DType dtype) {
  const GatedDeltaRuleAttributes& a = attributes;
  const int64_t elements = (delta_states(a.sequence) + 1) * a.key_dim * columns +
                           int64_t{a.sequence} * (4 * a.key_dim + 2) + 2 * columns;
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

std::string print_delta_rule(const Attributes& attributes) {
  const auto& a = attributes.as<GatedDeltaRuleAttributes>();
  return fmt::format("sequence={} key_heads={} value_heads={} key_dim={} value_dim={}", a.sequence,
                     a.key_heads, a.value_heads, a.key_dim, a.value_dim);
}

ValueId sample_delta_gates(SampleBuilder& sample, int64_t rows, int64_t heads) {
  std::vector<double> gates;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < 2 * heads; ++i) {
      const auto step = static_cast<double>((row * 7 + i * 5) % 11) / 11;
      gates.push_back(i < heads ? 0.1 + 0.8 * step : -1.5 * step);
    }
  }
  return sample.values("gates", {rows, 2 * heads}, gates, {.accumulation = true});
}

}  // namespace troupe
