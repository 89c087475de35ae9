#include "ops/losses/router_z_loss/router_z_loss.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel router_z_loss_cpu_kernel(DType dtype);
CpuKernel router_z_loss_gradient_cpu_kernel(DType dtype);
CudaKernel router_z_loss_cuda_kernel(const OpView& op);
CudaKernel router_z_loss_gradient_cuda_kernel(const OpView& op);

namespace {

void infer_router_z_loss(InferContext& context) {
  infer_router_loss(context, "router_z_loss", 1);
}

void infer_router_z_loss_gradient(InferContext& context) {
  infer_router_loss_gradient(context, "router_z_loss_gradient", 1);
}

void differentiate_router_z_loss(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto attributes = context.attributes<RouterZLossAttributes>();
  const ValueId gradient =
      context.builder().emit(kRouterZLossGradient, Attributes(attributes),
                             router_loss_gradient_inputs(context), "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

// A maximum, a difference, an exponential and its sum for each logit.
Cost cost_router_z_loss(const OpView& view) {
  return cost_router_loss(view, 4);
}

Cost cost_router_z_loss_gradient(const OpView& view) {
  return cost_router_loss(view, 5);
}

CpuKernel router_z_loss_kernel(const OpView& view) {
  return router_z_loss_cpu_kernel(view.input(0).dtype);
}

CpuKernel router_z_loss_gradient_kernel(const OpView& view) {
  return router_z_loss_gradient_cpu_kernel(view.input(0).dtype);
}

std::string print_router_z_loss(const Attributes& attributes) {
  return fmt::format("coefficient={}", attributes.as<RouterZLossAttributes>().coefficient);
}

OpSample sample_router_z_loss(const std::string& name, const Shape& shape, double coefficient) {
  return {name, [=](SampleBuilder& sample) {
            SampleBuilder::Options options;
            options.accumulation = true;
            options.deviation = 2;
            const ValueId logits = sample.tensor("logits", shape, options);
            sample.result(
                router_z_loss(sample.builder(), logits, {.coefficient = coefficient}, "loss"));
          }};
}

OpSample sample_masked_z_loss(const std::string& name, const std::vector<int32_t>& mask,
                              int32_t count) {
  return {
      name, [=](SampleBuilder& sample) {
        const auto tokens = static_cast<int64_t>(mask.size());
        SampleBuilder::Options options;
        options.accumulation = true;
        const ValueId logits = sample.tensor("logits", {tokens, 5}, options);
        const ValidTokens valid{.mask = sample.integers("valid", {tokens}, mask),
                                .count = sample.integers("count", {1}, {count})};
        sample.result(router_z_loss(sample.builder(), logits, {.coefficient = 1}, "loss", valid));
      }};
}

std::vector<OpSample> samples_router_z_loss() {
  return {
      sample_router_z_loss("a few tokens", {6, 5}, 1),
      sample_router_z_loss("more experts than lanes", {4, 35}, 0.25),
      sample_router_z_loss("one token, one expert", {1, 1}, 0.5),
      sample_masked_z_loss("padding, and tokens of other ranks", {1, 0, 1, 1, 0}, 7),
      sample_masked_z_loss("nothing but padding", {0, 0}, 0),
      {"many chunks",
       [](SampleBuilder& sample) {
         // Most logits are constants: only a few rows are worth a finite difference.
         SampleBuilder::Options options;
         options.accumulation = true;
         options.differentiable = false;
         const ValueId many = sample.tensor("many_logits", {10000, 5}, options);
         options.differentiable = true;
         const ValueId few = sample.tensor("logits", {3, 5}, options);
         for (const ValueId logits : {many, few}) {
           sample.result(router_z_loss(sample.builder(), logits, {.coefficient = 1}, "loss"));
         }
       }},
  };
}

}  // namespace

ValueId router_z_loss(Builder& builder, ValueId logits, const RouterZLossAttributes& attributes,
                      const std::string& name, const ValidTokens& valid) {
  return builder.emit(kRouterZLoss, Attributes(attributes), router_loss_inputs({logits}, valid),
                      name)[0];
}

const OpSpec kRouterZLoss{
    .name = "router_z_loss",
    .infer = infer_router_z_loss,
    .differentiate = differentiate_router_z_loss,
    .cost = cost_router_z_loss,
    .cpu = {.kernel = router_z_loss_kernel,
            .workspace = router_loss_workspace_bytes,
            .scratch = router_loss_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(router_z_loss_cuda_kernel), router_loss_cuda_scratch_bytes>,
    .print_attributes = print_router_z_loss,
    .samples = samples_router_z_loss};

const OpSpec kRouterZLossGradient{
    .name = "router_z_loss_gradient",
    .infer = infer_router_z_loss_gradient,
    .cost = cost_router_z_loss_gradient,
    .cpu = {.kernel = router_z_loss_gradient_kernel},
    .cuda = only_kernel<TROUPE_CUDA(router_z_loss_gradient_cuda_kernel)>,
    .print_attributes = print_router_z_loss};

}  // namespace troupe
