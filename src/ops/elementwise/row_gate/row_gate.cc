#include "ops/elementwise/row_gate/row_gate.h"

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel row_gate_cpu_kernel(const OpView& op);
CpuKernel row_gate_gradient_cpu_kernel(const OpView& op);
CudaKernel row_gate_cuda_kernel(const OpView& op);
CudaKernel row_gate_gradient_cuda_kernel(const OpView& op);

namespace {

void check_row_gate_inputs(const InferContext& context, int gate_input) {
  const Value& x = context.input(0);
  const Value& gate = context.input(gate_input);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid(),
               "row_gate: x is not [T, h]: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK((gate.dtype == x.dtype || gate.dtype == accumulation_dtype(x.dtype)) &&
                   gate.shape == Shape({x.shape[0], 1}) && !gate.rows.valid(),
               "row_gate: gate is not [T, 1] in the dtype of x or its accumulation dtype: " +
                   gate.name + " " + gate.shape.to_string());
}

void infer_row_gate(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "row_gate: takes x and gate");
  check_row_gate_inputs(context, 1);
  const Value& x = context.input(0);
  context.output("", x.dtype, x.shape);
}

void infer_row_gate_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "row_gate_gradient: takes x, dy and gate");
  check_row_gate_inputs(context, 2);
  const Value& x = context.input(0);
  const Value& dy = context.input(1);
  const Value& gate = context.input(2);
  TROUPE_CHECK(dy.dtype == x.dtype && dy.shape == x.shape && !dy.rows.valid(),
               "row_gate_gradient: dy does not belong to " + x.name);
  context.output("", x.dtype, x.shape);
  context.output("d_gate", gate.dtype, gate.shape);
}

void differentiate_row_gate(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients =
      context.builder().emit(kRowGateGradient, Attributes(NoAttributes()),
                             {context.input(0), context.output_gradient(0), context.input(1)},
                             "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

Cost cost_row_gate(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(1).bytes())};
}

Cost cost_row_gate_gradient(const OpView& op) {
  return {.flops = 3 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(3 * op.input(0).bytes() + 2 * op.input(2).bytes())};
}

std::vector<OpSample> samples_row_gate() {
  struct Case {
    int64_t rows;
    int64_t columns;
    bool wide_gate = false;  // in the accumulation dtype
    bool constant_x = false;
    bool constant_gate = false;
  };
  const auto with = [](const Case& c) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {c.rows, c.columns}, {.differentiable = !c.constant_x});
      const ValueId gate = sample.tensor(
          "gate", {c.rows, 1},
          {.deviation = 2, .differentiable = !c.constant_gate, .accumulation = c.wide_gate});
      sample.result(row_gate(sample.builder(), x, gate, "y"));
    };
  };
  // The first result dies in the second operation, which is stored over it.
  const auto chain = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5, 9});
    const ValueId a = sample.tensor("a", {5, 1});
    const ValueId b = sample.tensor("b", {5, 1});
    const ValueId once = row_gate(sample.builder(), x, a, "once");
    sample.result(row_gate(sample.builder(), once, b, "y"));
  };
  return {{"gate of the same dtype", with({6, 19})},
          {"gate in the accumulation dtype", with({4, 33, true})},
          {"one by one", with({1, 1, true})},
          {"constant gate", with({3, 7, false, false, true})},
          {"constant x, several chunks", with({600, 120, true, true})},
          {"chain", chain}};
}

}  // namespace

ValueId row_gate(Builder& builder, ValueId x, ValueId gate, const std::string& name) {
  return builder.emit(kRowGate, Attributes(NoAttributes()), {x, gate}, name)[0];
}

const OpSpec kRowGate{.name = "row_gate",
                      .infer = infer_row_gate,
                      .differentiate = differentiate_row_gate,
                      .cost = cost_row_gate,
                      .cpu = {.kernel = row_gate_cpu_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(row_gate_cuda_kernel)>,
                      .in_place = {.output = 0, .input = 0},
                      .samples = samples_row_gate};

const OpSpec kRowGateGradient{.name = "row_gate_gradient",
                              .infer = infer_row_gate_gradient,
                              .cost = cost_row_gate_gradient,
                              .cpu = {.kernel = row_gate_gradient_cpu_kernel},
                              .cuda = only_kernel<TROUPE_CUDA(row_gate_gradient_cuda_kernel)>,
                              .in_place = {.output = 0, .input = 1}};

}  // namespace troupe
