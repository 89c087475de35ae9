// Codes of activations and of their gradients, from an operation of their own after these, or from
// the one that makes both (ops/precision/quantize_activation).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/precision/quantize_activation/quantize_activation.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_product.h"
#include "program/op_sample.h"

namespace troupe::testing {

// Results: scales of transposed codes, what codes in rows stand for, and of transposed codes the
// sums of products of two columns over each expert's rows.
inline void show_codes(SampleBuilder& sample, const Quantized& q, ValueId offsets, int64_t experts,
                       BlockShape along_rows, BlockShape along_columns) {
  Builder& builder = sample.builder();
  sample.result_without_gradient(q.transposed.scales);
  const Shape shape = builder.value(q.rows.codes).shape;
  const int64_t columns = shape[1];
  std::vector<double> ones(static_cast<size_t>(experts * columns * columns), 0);
  for (int64_t i = 0; i < experts * columns; ++i) {
    ones[static_cast<size_t>(i * columns + i % columns)] = 1;
  }
  SampleBuilder::Options constant;
  constant.differentiable = false;
  const ValueId each = sample.values("each", {experts, columns, columns}, ones, constant);
  const Codes one =
      quantize(builder, each, {}, {}, {DType::f8e4m3, ScaleRule::power_of_two, {}}, "o").rows;
  QuantizedProductAttributes product{.compute = sample.dtype()};
  product.operands[0].block = along_rows;
  sample.result_without_gradient(
      builder.emit(kQuantizedGroupedLinear, Attributes(product),
                   {q.rows.codes, one.codes, q.rows.scales, one.scales, offsets}, "y")[0]);
  const auto transposed = QuantizedProductAttributes::transposed(along_columns, shape);
  product.operands = {transposed, transposed};
  sample.result_without_gradient(
      builder.emit(kQuantizedGroupedLinearWeightGradient, Attributes(product),
                   {q.transposed.codes, q.transposed.codes, q.transposed.scales,
                    q.transposed.scales, offsets, ValueId{}},
                   "dw")[0]);
}

struct ActivationCodes {
  bool is_gradient = false;
  ActivationAttributes activation = {};
  QuantizeAttributes codes = {};     // in both orders
  int64_t f = 0;                     // columns of the activation
  std::vector<int32_t> starts = {};  // of the experts' rows, and where the last one's end
};

// With weights of the router, which have gradients, the first result then; some rows are fillers.
// Then follow what is measured, and what show_codes() shows.
inline OpSample activation_codes(const ActivationCodes& form, bool as_made) {
  return {"activation codes", [=](SampleBuilder& sample) {
            Builder& builder = sample.builder();
            const auto experts = static_cast<int64_t>(form.starts.size()) - 1;
            const int64_t rows = form.starts.back() + 3;
            const ValueId offsets = sample.integers("offsets", {experts + 1}, form.starts);
            SampleBuilder::Options constant;
            constant.differentiable = false;
            SampleBuilder::Options ragged = constant;
            ragged.rows = offsets;
            ragged.rows_element = static_cast<int32_t>(experts);
            SampleBuilder::Options wide = constant;
            wide.accumulation = true;
            const int64_t width = form.f * (form.activation.gated ? 2 : 1);
            const ValueId x = sample.tensor("x", {rows, width}, ragged);
            const ValueId dy = sample.tensor("dy", {rows, form.f}, ragged);
            const ValueId weights = sample.tensor("weights", {rows, 1}, wide);
            std::vector<int32_t> slots;
            for (int64_t row = 0; row < rows; ++row) {
              slots.push_back(static_cast<int32_t>(row % 4 == 2 ? -1 : rows - 1 - row));
            }
            const ValueId row_slot = sample.integers("row_slot", {rows}, slots);
            ValueId amax;
            if (form.codes.measures) {
              SampleBuilder::Options before = constant;
              before.dtype = DType::f32;
              amax = sample.values("amax", {experts, 1},
                                   std::vector<double>(static_cast<size_t>(experts), 0.5), before);
            }
            Quantized q;
            std::vector<ValueId> outputs;
            if (as_made) {
              std::vector<ValueId> inputs = {x, offsets, amax};
              if (form.is_gradient) inputs.push_back(dy);
              inputs.insert(inputs.end(), {weights, row_slot});
              outputs = builder.emit(
                  form.is_gradient ? kQuantizeActivationGradient : kQuantizeActivation,
                  Attributes(QuantizeActivationAttributes{form.codes, form.activation}), inputs,
                  "q");
              q = quantized_of(outputs, form.codes);
            } else {
              std::vector<ValueId> inputs = {x};
              if (form.is_gradient) inputs.push_back(dy);
              inputs.insert(inputs.end(), {weights, row_slot});
              outputs = builder.emit(form.is_gradient ? kActivationGradient : kActivation,
                                     Attributes(form.activation), inputs, "made");
              q = quantize(builder, outputs[0], offsets, amax, form.codes, "q");
            }
            if (form.is_gradient) sample.result_without_gradient(outputs.back());
            if (q.amax.valid()) sample.result_without_gradient(q.amax);
            show_codes(sample, q, offsets, experts, form.codes.block, form.codes.transposed_block);
          }};
}

}  // namespace troupe::testing
