#include "ops/elementwise/fill/fill.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel fill_cpu_kernel(const OpView& op);
CudaKernel fill_cuda_kernel(const OpView& op);

namespace {

void infer_fill(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 0, "fill: takes no inputs");
  const auto& attributes = context.attributes<FillAttributes>();
  context.output("", attributes.dtype, attributes.shape);
}

Cost cost_fill(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.output(0).bytes())};
}

std::string print_fill(const Attributes& attributes) {
  return fmt::format("value={}", attributes.as<FillAttributes>().value);
}

std::vector<OpSample> samples_fill() {
  const auto sample_of = [](double value, const Shape& shape) {
    return [=](SampleBuilder& sample) {
      sample.result(fill(sample.builder(), value, sample.dtype(), shape, "constant"));
    };
  };
  const auto integers = [](SampleBuilder& sample) {
    sample.result_without_gradient(fill(sample.builder(), -3, DType::i32, {5}, "i32"));
    sample.result_without_gradient(fill(sample.builder(), 4, DType::i64, {2, 2}, "i64"));
    sample.result_without_gradient(fill(sample.builder(), 255, DType::u8, {3}, "u8"));
  };
  return {{"zero", sample_of(0, {3, 5})},
          {"scalar", sample_of(-1.5, {})},
          {"several chunks", sample_of(0.25, {3, 40001})},
          {"integers", integers}};
}

}  // namespace

ValueId fill(Builder& builder, double value, DType dtype, const Shape& shape,
             const std::string& name) {
  const FillAttributes attributes{.value = value, .shape = shape, .dtype = dtype};
  return builder.emit(kFill, Attributes(attributes), {}, name)[0];
}

const OpSpec kFill{.name = "fill",
                   .infer = infer_fill,
                   .cost = cost_fill,
                   .cpu = {.kernel = fill_cpu_kernel},
                   .cuda = only_kernel<TROUPE_CUDA(fill_cuda_kernel)>,
                   .print_attributes = print_fill,
                   .samples = samples_fill};

}  // namespace troupe
