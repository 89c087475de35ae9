#include "ops/swiglu/swiglu.h"

#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel swiglu_cpu_kernel(const OpView& op);
CpuKernel swiglu_gradient_cpu_kernel(const OpView& op);

namespace {

// Checks gate_up (input 0) and the optional weights and slots (inputs `weights` and after it).
void check_swiglu_inputs(const InferContext& context, int weights_input) {
  const Value& gate_up = context.input(0);
  TROUPE_CHECK(
      is_float(gate_up.dtype) && gate_up.shape.rank() == 2 && gate_up.shape[1] > 0 &&
          gate_up.shape[1] % 2 == 0,
      "swiglu: gate_up is not [R, 2 f]: " + gate_up.name + " " + gate_up.shape.to_string());
  TROUPE_CHECK(context.has_input(weights_input) == context.has_input(weights_input + 1),
               "swiglu: weights and row_slot come together");
  if (!context.has_input(weights_input)) return;
  const Value& weights = context.input(weights_input);
  const Value& row_slot = context.input(weights_input + 1);
  TROUPE_CHECK(weights.dtype == accumulation_dtype(gate_up.dtype) && weights.shape.rank() == 2 &&
                   !weights.rows.valid(),
               "swiglu: weights are not [T, k] in the accumulation dtype: " + weights.name);
  TROUPE_CHECK(row_slot.dtype == DType::i32 && row_slot.shape == Shape({gate_up.shape[0]}),
               "swiglu: row_slot is not i32 [R]: " + row_slot.name);
}

void infer_swiglu(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "swiglu: takes gate_up, weights and row_slot");
  check_swiglu_inputs(context, 1);
  const Value gate_up = context.input(0);
  context.output("", gate_up.dtype, {gate_up.shape[0], gate_up.shape[1] / 2}, gate_up.rows);
}

void infer_swiglu_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "swiglu_gradient: takes gate_up, dy, weights and row_slot");
  check_swiglu_inputs(context, 2);
  const Value gate_up = context.input(0);
  const Value& dy = context.input(1);
  TROUPE_CHECK(dy.dtype == gate_up.dtype && dy.rows == gate_up.rows &&
                   dy.shape == Shape({gate_up.shape[0], gate_up.shape[1] / 2}),
               "swiglu_gradient: dy does not belong to " + gate_up.name);
  context.output("", gate_up.dtype, gate_up.shape, gate_up.rows);
  if (context.has_input(2)) {
    const Value weights = context.input(2);
    context.output("d_weights", weights.dtype, weights.shape);
  }
}

void differentiate_swiglu(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kSwigluGradient, Attributes(NoAttributes()),
      {context.input(0), context.output_gradient(0), context.input(1), context.input(2)},
      "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

// An exponential counts as ten flops.
Cost cost_swiglu(const OpView& op) {
  const bool weighted = op.has_input(1);
  const auto elements = static_cast<double>(op.output(0).shape.elements());
  const auto rows = static_cast<double>(op.output(0).shape[0]);
  return {.flops = (weighted ? 15 : 14) * elements,
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes()) +
                   (weighted ? static_cast<double>(op.input(2).bytes()) +
                                   rows * static_cast<double>(size_of(op.input(1).dtype))
                             : 0)};
}

Cost cost_swiglu_gradient(const OpView& op) {
  const bool weighted = op.has_input(2);
  const auto elements = static_cast<double>(op.input(1).shape.elements());
  const auto rows = static_cast<double>(op.input(1).shape[0]);
  return {.flops = (weighted ? 24 : 20) * elements,
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(1).bytes()) +
                   (weighted ? static_cast<double>(op.input(3).bytes() + op.output(1).bytes()) +
                                   rows * static_cast<double>(size_of(op.input(2).dtype))
                             : 0)};
}

std::vector<OpSample> samples_swiglu() {
  const auto plain = [](int64_t rows, int64_t f, double deviation) {
    return [=](SampleBuilder& sample) {
      const ValueId gate_up = sample.tensor("gate_up", {rows, 2 * f}, {.deviation = deviation});
      sample.result(swiglu(sample.builder(), gate_up, ValueId{}, ValueId{}, "y"));
    };
  };
  // Not all slots have a row; `live` of the bound's rows do.
  const auto weighted = [](int64_t f, int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {2}, {0, live});
      const ValueId gate_up =
          sample.tensor("gate_up", {6, 2 * f}, {.rows = rows, .rows_element = 1});
      const ValueId weights = sample.tensor("weights", {3, 2}, {.accumulation = true});
      const ValueId row_slot = sample.integers("row_slot", {6}, {3, 0, 5, 2, -7, 1000});
      sample.result(swiglu(sample.builder(), gate_up, weights, row_slot, "y"));
    };
  };
  const auto constant_weights = [](SampleBuilder& sample) {
    const ValueId gate_up = sample.tensor("gate_up", {4, 10});
    const ValueId weights =
        sample.tensor("weights", {2, 2}, {.differentiable = false, .accumulation = true});
    const ValueId row_slot = sample.integers("row_slot", {4}, {3, 0, 1, 2});
    sample.result(swiglu(sample.builder(), gate_up, weights, row_slot, "y"));
  };
  const auto only_weights = [](SampleBuilder& sample) {
    const ValueId gate_up = sample.tensor("gate_up", {900, 100}, {.differentiable = false});
    const ValueId weights = sample.tensor("weights", {450, 2}, {.accumulation = true});
    std::vector<int32_t> slots;
    for (int32_t r = 0; r < 900; ++r) slots.push_back(r * 7 % 900);
    const ValueId row_slot = sample.integers("row_slot", {900}, slots);
    sample.result(swiglu(sample.builder(), gate_up, weights, row_slot, "y"));
  };
  return {{"plain", plain(4, 19, 2)},
          {"one by one", plain(1, 1, 1)},
          {"steep", plain(3, 16, 10)},
          {"weighted", weighted(17, 4)},
          {"weighted without rows", weighted(5, 0)},
          {"constant weights", constant_weights},
          {"weights only, several chunks", only_weights}};
}

}  // namespace

ValueId swiglu(Builder& builder, ValueId gate_up, ValueId weights, ValueId row_slot,
               const std::string& name) {
  return builder.emit(kSwiglu, Attributes(NoAttributes()), {gate_up, weights, row_slot}, name)[0];
}

const OpSpec kSwiglu{.name = "swiglu",
                     .infer = infer_swiglu,
                     .differentiate = differentiate_swiglu,
                     .cost = cost_swiglu,
                     .cpu_kernel = swiglu_cpu_kernel,
                     .samples = samples_swiglu};

const OpSpec kSwigluGradient{.name = "swiglu_gradient",
                             .infer = infer_swiglu_gradient,
                             .cost = cost_swiglu_gradient,
                             .cpu_kernel = swiglu_gradient_cpu_kernel,
                             .in_place = {.output = 0, .input = 0}};

}  // namespace troupe
