#include "ops/losses/router_entropy/router_entropy.h"

#include <limits>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel router_entropy_cpu_kernel(DType dtype);
CudaKernel router_entropy_cuda_kernel(const OpView& op);

namespace {

void infer_router_entropy(InferContext& context) {
  infer_router_loss(context, "router_entropy", 1);
}

// A maximum, a difference, an exponential and two sums for each logit.
Cost cost_router_entropy(const OpView& view) {
  return cost_router_loss(view, 6);
}

CpuKernel router_entropy_kernel(const OpView& view) {
  return router_entropy_cpu_kernel(view.input(0).dtype);
}

OpSample sample_router_entropy(const std::string& name, const Shape& shape) {
  return {name, [=](SampleBuilder& sample) {
            SampleBuilder::Options options;
            options.accumulation = true;
            options.differentiable = false;
            options.deviation = 2;
            const ValueId logits = sample.tensor("logits", shape, options);
            sample.result_without_gradient(router_entropy(sample.builder(), logits, "entropy"));
          }};
}

std::vector<OpSample> samples_router_entropy() {
  return {
      sample_router_entropy("a few tokens", {6, 5}),
      sample_router_entropy("more experts than lanes", {4, 35}),
      sample_router_entropy("one token, one expert", {1, 1}),
      sample_router_entropy("many chunks", {10000, 5}),
      {"padding, and tokens of other ranks",
       [](SampleBuilder& sample) {
         SampleBuilder::Options options;
         options.accumulation = true;
         options.differentiable = false;
         const ValueId logits = sample.tensor("logits", {4, 5}, options);
         const ValidTokens valid{.mask = sample.integers("valid", {4}, {0, 1, 1, 0}),
                                 .count = sample.integers("count", {1}, {3})};
         sample.result_without_gradient(router_entropy(sample.builder(), logits, "entropy", valid));
       }},
      {"experts without a chance",
       [](SampleBuilder& sample) {
         constexpr double kNever = -std::numeric_limits<double>::infinity();
         SampleBuilder::Options options;
         options.accumulation = true;
         options.differentiable = false;
         const ValueId logits =
             sample.values("logits", {2, 3}, {1, kNever, 2, -500, 500, kNever}, options);
         sample.result_without_gradient(router_entropy(sample.builder(), logits, "entropy"));
       }},
  };
}

}  // namespace

ValueId router_entropy(Builder& builder, ValueId logits, const std::string& name,
                       const ValidTokens& valid) {
  return builder.emit(kRouterEntropy, Attributes(NoAttributes{}),
                      router_loss_inputs({logits}, valid), name)[0];
}

const OpSpec kRouterEntropy{
    .name = "router_entropy",
    .infer = infer_router_entropy,
    .cost = cost_router_entropy,
    .cpu = {.kernel = router_entropy_kernel,
            .workspace = router_loss_workspace_bytes,
            .scratch = router_loss_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(router_entropy_cuda_kernel), router_loss_cuda_scratch_bytes>,
    .samples = samples_router_entropy};

}  // namespace troupe
