#include "ops/elementwise/add_bias/add_bias.h"

#include "ops/choose_kernel.h"
#include "ops/products/linear/linear.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel add_bias_cpu_kernel(const OpView& op);
CudaKernel add_bias_cuda_kernel(const OpView& op);

namespace {

void infer_add_bias(InferContext& context) {
  const Value& x = context.input(0);
  const Value& bias = context.input(1);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid() &&
                   bias.dtype == x.dtype && bias.shape == Shape({x.shape[1]}),
               "add_bias: x " + x.shape.to_string() + " and bias " + bias.shape.to_string());
  context.output("", x.dtype, x.shape);
}

void differentiate_add_bias(DerivativeContext& context) {
  if (context.wants(0)) context.add_gradient(0, context.output_gradient(0));
  if (context.wants(1)) add_bias_gradient(context, 1, context.output_gradient(0));
}

Cost cost_add_bias(const OpView& op) {
  return {.flops = static_cast<double>(op.output(0).shape.elements()),
          .bytes = 2 * static_cast<double>(op.output(0).bytes()) +
                   static_cast<double>(op.input(1).bytes())};
}

std::vector<OpSample> samples_add_bias() {
  const auto with = [](int64_t rows, int64_t columns) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, columns});
      const ValueId bias = sample.tensor("bias", {columns});
      sample.result(add_bias(sample.builder(), x, bias, "y"));
    };
  };
  return {{"rows", with(5, 7)}, {"one_by_one", with(1, 1)}, {"long_rows", with(2, 130)}};
}

}  // namespace

ValueId add_bias(Builder& builder, ValueId x, ValueId bias, const std::string& name) {
  if (!bias.valid()) return x;
  return builder.emit(kAddBias, Attributes(NoAttributes()), {x, bias}, name)[0];
}

const OpSpec kAddBias{.name = "add_bias",
                      .infer = infer_add_bias,
                      .differentiate = differentiate_add_bias,
                      .cost = cost_add_bias,
                      .cpu = {.kernel = add_bias_cpu_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(add_bias_cuda_kernel)>,
                      .in_place = {.output = 0, .input = 0},
                      .samples = samples_add_bias};

}  // namespace troupe
