#include "ops/attention/delta_gates/delta_gates.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel delta_gates_cpu_kernel(const OpView& op);
CpuKernel delta_gates_gradient_cpu_kernel(const OpView& op);
CpuKernel delta_gates_parameter_gradient_cpu_kernel(const OpView& op);
CudaKernel delta_gates_cuda_kernel(const OpView& op);
CudaKernel delta_gates_gradient_cuda_kernel(const OpView& op);
CudaKernel delta_gates_parameter_gradient_cuda_kernel(const OpView& op);

namespace {

// Inputs x, A_log and dt_bias from `first` on.
void check_delta_gates(const InferContext& context, const DeltaGatesAttributes& attributes,
                       int first) {
  const Value& x = context.input(first);
  const int64_t heads = attributes.heads;
  TROUPE_CHECK(heads > 0 && attributes.group_heads > 0 && heads % attributes.group_heads == 0 &&
                   is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] == 2 * heads &&
                   !x.rows.valid(),
               "delta_gates: x is not [T, 2 H]: " + x.name + " " + x.shape.to_string());
  for (const int input : {first + 1, first + 2}) {
    const Value& vector = context.input(input);
    TROUPE_CHECK(vector.dtype == accumulation_dtype(x.dtype) && vector.shape == Shape({heads}),
                 "delta_gates: " + vector.name + " is not [H] in the accumulation dtype");
  }
}

void check_gates_gradient(const InferContext& context) {
  const Value& d_gates = context.input(0);
  const Value& x = context.input(1);
  TROUPE_CHECK(d_gates.dtype == accumulation_dtype(x.dtype) && d_gates.shape == x.shape,
               "delta_gates: the gradient does not belong to " + x.name);
}

void infer_delta_gates(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "delta_gates: takes x, A_log and dt_bias");
  check_delta_gates(context, context.attributes<DeltaGatesAttributes>(), 0);
  const Value x = context.input(0);
  context.output("", accumulation_dtype(x.dtype), x.shape);
}

void infer_delta_gates_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "delta_gates_gradient: takes d_gates, x, A_log and dt_bias");
  check_delta_gates(context, context.attributes<DeltaGatesAttributes>(), 1);
  check_gates_gradient(context);
  const Value x = context.input(1);
  context.output("", x.dtype, x.shape);
}

void infer_delta_gates_parameter_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "delta_gates_parameter_gradient: takes d_gates, x, A_log, dt_bias and target");
  check_delta_gates(context, context.attributes<DeltaGatesParameterGradientAttributes>().gates, 1);
  check_gates_gradient(context);
  declare_weight_gradient(context, 4, "", context.input(2).dtype, context.input(2).shape);
}

void differentiate_delta_gates(DerivativeContext& context) {
  Builder& builder = context.builder();
  const auto attributes = context.attributes<DeltaGatesAttributes>();
  const ValueId d_gates = context.output_gradient(0);
  if (context.wants(0)) {
    context.add_gradient(
        0, builder.emit(kDeltaGatesGradient, Attributes(attributes),
                        {d_gates, context.input(0), context.input(1), context.input(2)},
                        "d_" + context.input_name(0))[0]);
  }
  for (const int input : {1, 2}) {
    if (!context.wants(input)) continue;
    const auto target = context.weight_target(input);
    const DeltaGatesParameterGradientAttributes of_parameter{
        .gates = attributes, .of_bias = input == 2, .accumulate = target.accumulate};
    context.add_weight_gradient(
        input,
        builder.emit(kDeltaGatesParameterGradient, Attributes(of_parameter),
                     {d_gates, context.input(0), context.input(1), context.input(2), target.target},
                     "d_" + context.input_name(input))[0]);
  }
}

// A sigmoid, a softplus and their products; a dozen operations each way.
Cost cost_delta_gates(const OpView& op) {
  return {.flops = 12 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

Cost cost_delta_gates_gradient(const OpView& op) {
  return {.flops = 12 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes())};
}

Cost cost_delta_gates_parameter_gradient(const OpView& op) {
  return {.flops = 6 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes()) / 2};
}

std::string print_delta_gates(const Attributes& attributes) {
  const auto& values = attributes.as<DeltaGatesAttributes>();
  return fmt::format("heads={} group_heads={}", values.heads, values.group_heads);
}

std::string print_delta_gates_parameter_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<DeltaGatesParameterGradientAttributes>();
  return fmt::format("{} of={}{}", print_delta_gates(Attributes(values.gates)),
                     values.of_bias ? "dt_bias" : "A_log",
                     values.accumulate ? " accumulate=1" : "");
}

std::vector<OpSample> samples_delta_gates() {
  const auto gates = [](int64_t rows, const DeltaGatesAttributes& attributes) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, 2 * int64_t{attributes.heads}}, {.deviation = 2});
      const ValueId decay = sample.tensor("decay_log", {attributes.heads}, {.accumulation = true});
      const ValueId bias = sample.tensor("dt_bias", {attributes.heads}, {.accumulation = true});
      sample.result(delta_gates(sample.builder(), x, decay, bias, attributes, "gates"));
    };
  };
  // Two uses of the same parameters: the second gradient is added to the first.
  const auto twice = [](SampleBuilder& sample) {
    const DeltaGatesAttributes attributes{.heads = 2, .group_heads = 2};
    const ValueId decay = sample.tensor("decay_log", {2}, {.accumulation = true});
    const ValueId bias = sample.tensor("dt_bias", {2}, {.accumulation = true});
    for (const char* name : {"first", "second"}) {
      const ValueId x = sample.tensor(name, {3, 4});
      sample.result(
          delta_gates(sample.builder(), x, decay, bias, attributes, std::string(name) + "_gates"));
    }
  };
  return {{"two groups", gates(5, {.heads = 6, .group_heads = 3})},
          {"one head for each group", gates(4, {.heads = 3, .group_heads = 1})},
          {"smallest", gates(1, {.heads = 1, .group_heads = 1})},
          {"parameters used twice", twice},
          {"many rows", gates(70, {.heads = 2, .group_heads = 1})}};
}

}  // namespace

ValueId delta_gates(Builder& builder, ValueId x, ValueId decay_log, ValueId bias,
                    const DeltaGatesAttributes& attributes, const std::string& name) {
  return builder.emit(kDeltaGates, Attributes(attributes), {x, decay_log, bias}, name)[0];
}

const OpSpec kDeltaGates{.name = "delta_gates",
                         .infer = infer_delta_gates,
                         .differentiate = differentiate_delta_gates,
                         .cost = cost_delta_gates,
                         .cpu = {.kernel = delta_gates_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(delta_gates_cuda_kernel)>,
                         .print_attributes = print_delta_gates,
                         .samples = samples_delta_gates};

const OpSpec kDeltaGatesGradient{.name = "delta_gates_gradient",
                                 .infer = infer_delta_gates_gradient,
                                 .cost = cost_delta_gates_gradient,
                                 .cpu = {.kernel = delta_gates_gradient_cpu_kernel},
                                 .cuda = only_kernel<TROUPE_CUDA(delta_gates_gradient_cuda_kernel)>,
                                 .print_attributes = print_delta_gates};

const OpSpec kDeltaGatesParameterGradient{
    .name = "delta_gates_parameter_gradient",
    .infer = infer_delta_gates_parameter_gradient,
    .cost = cost_delta_gates_parameter_gradient,
    .cpu = {.kernel = delta_gates_parameter_gradient_cpu_kernel},
    .cuda = only_kernel<TROUPE_CUDA(delta_gates_parameter_gradient_cuda_kernel)>,
    .print_attributes = print_delta_gates_parameter_gradient};

}  // namespace troupe
