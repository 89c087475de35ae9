#include "ops/elementwise/sigmoid_gate/sigmoid_gate.h"

#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel sigmoid_gate_cpu_kernel(const OpView& op);
CpuKernel sigmoid_gate_gradient_cpu_kernel(const OpView& op);
CudaKernel sigmoid_gate_cuda_kernel(const OpView& op);
CudaKernel sigmoid_gate_gradient_cuda_kernel(const OpView& op);

namespace {

void check_sigmoid_gate(const InferContext& context, int inputs) {
  TROUPE_CHECK(context.input_count() == inputs, "sigmoid_gate: operands");
  const Value& x = context.input(0);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid(),
               "sigmoid_gate: x is not [T, n]: " + x.name + " " + x.shape.to_string());
  for (int i = 1; i < inputs; ++i) {
    const Value& other = context.input(i);
    TROUPE_CHECK(other.dtype == x.dtype && other.shape == x.shape && !other.rows.valid(),
                 "sigmoid_gate: " + other.name + " differs in type from " + x.name);
  }
}

void infer_sigmoid_gate(InferContext& context) {
  check_sigmoid_gate(context, 2);
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape);
}

void infer_sigmoid_gate_gradient(InferContext& context) {
  check_sigmoid_gate(context, 3);
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape);
  context.output("d_gate", x.dtype, x.shape);
}

void differentiate_sigmoid_gate(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients =
      context.builder().emit(kSigmoidGateGradient, Attributes(NoAttributes()),
                             {context.output_gradient(0), context.input(0), context.input(1)},
                             "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

Cost cost_sigmoid_gate(const OpView& op) {
  return {.flops = 4 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 3 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_sigmoid_gate_gradient(const OpView& op) {
  return {.flops = 8 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 5 * static_cast<double>(op.input(0).bytes())};
}

std::vector<OpSample> samples_sigmoid_gate() {
  const auto with = [](const Shape& shape, bool constant_x, bool constant_gate) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", shape, {.differentiable = !constant_x});
      const ValueId gate =
          sample.tensor("gate", shape, {.deviation = 2, .differentiable = !constant_gate});
      sample.result(sigmoid_gate(sample.builder(), x, gate, "y"));
    };
  };
  // The first result dies in the second operation, which is stored over it.
  const auto chain = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5, 9});
    const ValueId a = sample.tensor("a", {5, 9});
    const ValueId b = sample.tensor("b", {5, 9});
    const ValueId once = sigmoid_gate(sample.builder(), x, a, "once");
    sample.result(sigmoid_gate(sample.builder(), once, b, "y"));
  };
  return {{"matrix", with({6, 19}, false, false)},
          {"smallest", with({1, 1}, false, false)},
          {"constant gate", with({3, 7}, false, true)},
          {"packs", with({4, 16}, true, false)},
          {"chain", chain}};
}

}  // namespace

ValueId sigmoid_gate(Builder& builder, ValueId x, ValueId gate, const std::string& name) {
  return builder.emit(kSigmoidGate, Attributes(NoAttributes()), {x, gate}, name)[0];
}

const OpSpec kSigmoidGate{.name = "sigmoid_gate",
                          .infer = infer_sigmoid_gate,
                          .differentiate = differentiate_sigmoid_gate,
                          .cost = cost_sigmoid_gate,
                          .cpu = {.kernel = sigmoid_gate_cpu_kernel},
                          .cuda = only_kernel<TROUPE_CUDA(sigmoid_gate_cuda_kernel)>,
                          .in_place = {.output = 0, .input = 0},
                          .samples = samples_sigmoid_gate};

const OpSpec kSigmoidGateGradient{
    .name = "sigmoid_gate_gradient",
    .infer = infer_sigmoid_gate_gradient,
    .cost = cost_sigmoid_gate_gradient,
    .cpu = {.kernel = sigmoid_gate_gradient_cpu_kernel},
    .cuda = only_kernel<TROUPE_CUDA(sigmoid_gate_gradient_cuda_kernel)>,
    .in_place = {.output = 0, .input = 0}};

}  // namespace troupe
