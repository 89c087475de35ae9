#include "ops/losses/loss_scale/loss_scale.h"

#include <vector>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel scale_gradient_cpu_kernel(const OpView& op);
CudaKernel scale_gradient_cuda_kernel(const OpView& op);

namespace {

void infer_scale_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "scale_gradient takes a gradient and a scale");
  const Value gradient = context.input(0);
  const Value& scale = context.input(1);
  TROUPE_CHECK((gradient.dtype == DType::f64 || gradient.dtype == DType::f32) &&
                   gradient.shape == Shape({1}),
               "scale_gradient: not f32 or f64 [1]: " + gradient.name);
  TROUPE_CHECK(scale.dtype == DType::f64 && scale.shape == Shape({1}),
               "scale_gradient: a scale is f64 [1]: " + scale.name);
  context.output("", gradient.dtype, {1});
}

Cost cost_scale_gradient(const OpView& op) {
  return {.flops = 1, .bytes = 3 * static_cast<double>(op.input(1).bytes())};
}

std::vector<OpSample> samples_scale_gradient() {
  const auto of = [](DType dtype) {
    return [=](SampleBuilder& sample) {
      const ValueId gradient =
          sample.values("gradient", {1}, {0.125}, {.differentiable = false, .dtype = dtype});
      const ValueId scale =
          sample.values("loss_scale", {1}, {1024}, {.differentiable = false, .dtype = DType::f64});
      sample.result_without_gradient(scale_gradient(sample.builder(), gradient, scale, "scaled"));
    };
  };
  return {{"f32", of(DType::f32)}, {"f64", of(DType::f64)}};
}

}  // namespace

ValueId scale_gradient(Builder& builder, ValueId gradient, ValueId scale, const std::string& name) {
  return builder.emit(kScaleGradient, Attributes(NoAttributes()), {gradient, scale}, name)[0];
}

const OpSpec kScaleGradient{.name = "scale_gradient",
                            .infer = infer_scale_gradient,
                            .cost = cost_scale_gradient,
                            .cpu = {.kernel = scale_gradient_cpu_kernel},
                            .cuda = only_kernel<TROUPE_CUDA(scale_gradient_cuda_kernel)>,
                            .samples = samples_scale_gradient};

}  // namespace troupe
