#include "ops/losses/load_balancing_loss/load_balancing_loss.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/routing/count_experts/count_experts.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel load_balancing_loss_cpu_kernel(DType dtype);
CpuKernel load_balancing_loss_gradient_cpu_kernel(DType dtype);
CudaKernel load_balancing_loss_cuda_kernel(const OpView& op);
CudaKernel load_balancing_loss_gradient_cuda_kernel(const OpView& op);

namespace {

// Checks what the loss and its gradient take beside the logits. `inputs`: of the loss.
void check_load_balancing_counts(const InferContext& context, int inputs) {
  const Shape& logits = context.input(0).shape;
  const Value& counts = context.input(1);
  const auto& attributes = context.attributes<LoadBalancingLossAttributes>();
  TROUPE_CHECK(attributes.top_k >= 1 && attributes.top_k <= logits[1],
               "load_balancing_loss: top_k is between 1 and E");
  TROUPE_CHECK(attributes.steps >= 1 && attributes.sequences >= 1 &&
                   are_sequences(logits[0], attributes.sequences, attributes.sequence_tokens,
                                 attributes.first_token),
               "load_balancing_loss needs sequences of equal length");
  TROUPE_CHECK(counts.dtype == DType::i32 &&
                   counts.shape == expert_counts_shape(attributes.sequences, logits[1]),
               "load_balancing_loss needs i32 counts [E], or [G, E]: " + counts.name);
  if (inputs == 2) return;
  TROUPE_CHECK(attributes.sequences == 1 || attributes.steps == 1,
               "load_balancing_loss: running sums tell no sequence's number of valid tokens");
}

void infer_load_balancing_loss(InferContext& context) {
  infer_router_loss(context, "load_balancing_loss", 2);
  check_load_balancing_counts(context, context.input_count());
}

void infer_load_balancing_loss_gradient(InferContext& context) {
  infer_router_loss_gradient(context, "load_balancing_loss_gradient", 2);
  check_load_balancing_counts(context, context.input_count() - 1);
}

void differentiate_load_balancing_loss(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto attributes = context.attributes<LoadBalancingLossAttributes>();
  const ValueId gradient =
      context.builder().emit(kLoadBalancingLossGradient, Attributes(attributes),
                             router_loss_gradient_inputs(context), "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

// A maximum, an exponential, its sum and a product with the counts for each logit.
Cost cost_load_balancing_loss(const OpView& view) {
  return cost_router_loss(view, 5);
}

Cost cost_load_balancing_loss_gradient(const OpView& view) {
  return cost_router_loss(view, 8);
}

CpuKernel load_balancing_loss_kernel(const OpView& view) {
  return load_balancing_loss_cpu_kernel(view.input(0).dtype);
}

CpuKernel load_balancing_loss_gradient_kernel(const OpView& view) {
  return load_balancing_loss_gradient_cpu_kernel(view.input(0).dtype);
}

std::string print_load_balancing_loss(const Attributes& attributes) {
  const auto& a = attributes.as<LoadBalancingLossAttributes>();
  std::string text = fmt::format("coefficient={} top_k={} score={}", a.coefficient, a.top_k,
                                 name_of(a.score_function));
  if (a.sequences != 1) text += fmt::format(" sequences={}", a.sequences);
  if (a.sequence_tokens != 0) {
    text += fmt::format(" sequence_tokens={} first_token={}", a.sequence_tokens, a.first_token);
  }
  if (a.steps != 1) text += fmt::format(" steps={}", a.steps);
  return text;
}

OpSample sample_load_balancing_loss(const std::string& name, int64_t tokens, int64_t experts,
                                    const std::vector<int32_t>& counts,
                                    const LoadBalancingLossAttributes& attributes) {
  return {name, [=](SampleBuilder& sample) {
            SampleBuilder::Options options;
            options.accumulation = true;
            const ValueId logits = sample.tensor("logits", {tokens, experts}, options);
            const ValueId n = sample.integers(
                "counts", expert_counts_shape(attributes.sequences, experts), counts);
            sample.result(load_balancing_loss(sample.builder(), logits, n, attributes, "loss"));
          }};
}

OpSample sample_masked_balancing(const std::string& name, int64_t experts,
                                 const std::vector<int32_t>& mask,
                                 const std::vector<int32_t>& counts, int32_t count,
                                 const LoadBalancingLossAttributes& attributes) {
  return {
      name, [=](SampleBuilder& sample) {
        const auto tokens = static_cast<int64_t>(mask.size());
        SampleBuilder::Options options;
        options.accumulation = true;
        const ValueId logits = sample.tensor("logits", {tokens, experts}, options);
        const ValueId n =
            sample.integers("counts", expert_counts_shape(attributes.sequences, experts), counts);
        const ValidTokens valid{.mask = sample.integers("valid", {tokens}, mask),
                                .count = sample.integers("count", {1}, {count})};
        sample.result(load_balancing_loss(sample.builder(), logits, n, attributes, "loss", valid));
      }};
}

std::vector<OpSample> samples_load_balancing_loss() {
  return {
      sample_load_balancing_loss("an expert without tokens", 6, 4, {5, 0, 3, 4},
                                 {.coefficient = 1, .top_k = 2}),
      sample_load_balancing_loss("more experts than lanes", 10, 20,
                                 {1, 2, 0, 3, 1, 1, 0, 0, 2, 1, 4, 1, 0, 1, 0, 1, 2, 0, 1, 9},
                                 {.coefficient = 0.5, .top_k = 3}),
      sample_load_balancing_loss("one token", 1, 3, {0, 1, 0}, {.coefficient = 2, .top_k = 1}),
      sample_load_balancing_loss(
          "sigmoid", 6, 4, {5, 0, 3, 4},
          {.coefficient = 1, .top_k = 2, .score_function = ScoreFunction::sigmoid}),
      sample_load_balancing_loss(
          "sqrtsoftplus, more experts than lanes", 5, 18,
          {1, 2, 0, 1, 1, 1, 0, 0, 2, 1, 0, 1, 0, 1, 0, 1, 2, 1},
          {.coefficient = 1, .top_k = 3, .score_function = ScoreFunction::sqrtsoftplus}),
      sample_load_balancing_loss("three sequences", 6, 4, {2, 0, 1, 1, 0, 2, 2, 0, 1, 1, 1, 1},
                                 {.coefficient = 1, .top_k = 2, .sequences = 3}),
      sample_load_balancing_loss(
          "the end of one sequence and a part of the next", 4, 3, {4, 1, 3, 0, 4, 4},
          {.coefficient = 1, .top_k = 2, .sequences = 2, .sequence_tokens = 5, .first_token = 3}),
      sample_load_balancing_loss("sums of four micro-batches", 5, 4, {11, 2, 12, 15},
                                 {.coefficient = 1, .top_k = 2, .steps = 4}),
      sample_load_balancing_loss("two sequences, sigmoid, sums of two micro-batches", 4, 3,
                                 {4, 1, 3, 0, 4, 4},
                                 {.coefficient = 1,
                                  .top_k = 2,
                                  .score_function = ScoreFunction::sigmoid,
                                  .sequences = 2,
                                  .steps = 2}),
      sample_masked_balancing("padding", 4, {1, 1, 0, 1, 0, 0}, {1, 0, 2, 3}, 3,
                              {.coefficient = 1, .top_k = 2}),
      sample_masked_balancing("nothing but padding", 3, {0, 0}, {0, 0, 0}, 0,
                              {.coefficient = 1, .top_k = 1}),
      sample_masked_balancing(
          "three sequences with padding, one of them nothing else, sigmoid", 4, {1, 1, 0, 0, 0, 1},
          {2, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0}, 3,
          {.coefficient = 1, .top_k = 2, .score_function = ScoreFunction::sigmoid, .sequences = 3}),
      sample_masked_balancing(
          "padding in the end of one sequence and a part of the next", 3, {1, 0, 0, 1},
          {4, 1, 3, 0, 4, 2}, 7,
          {.coefficient = 1, .top_k = 2, .sequences = 2, .sequence_tokens = 5, .first_token = 3}),
      sample_masked_balancing("padding, sums of four micro-batches, sqrtsoftplus", 4,
                              {0, 1, 1, 1, 0}, {11, 2, 12, 15}, 3,
                              {.coefficient = 1,
                               .top_k = 2,
                               .score_function = ScoreFunction::sqrtsoftplus,
                               .steps = 4}),
      {"many chunks",
       [](SampleBuilder& sample) {
         // Most logits are constants: only a few rows are worth a finite difference.
         SampleBuilder::Options options;
         options.accumulation = true;
         options.differentiable = false;
         const ValueId many = sample.tensor("many_logits", {10000, 5}, options);
         options.differentiable = true;
         const ValueId few = sample.tensor("logits", {3, 5}, options);
         const ValueId counts = sample.integers("counts", {5}, {4000, 0, 1500, 2500, 2000});
         for (const ValueId logits : {many, few}) {
           const auto tokens = static_cast<double>(sample.builder().value(logits).shape[0]);
           sample.result(load_balancing_loss(sample.builder(), logits, counts,
                                             {.coefficient = tokens / 10000, .top_k = 1}, "loss"));
         }
       }},
  };
}

}  // namespace

ValueId load_balancing_loss(Builder& builder, ValueId logits, ValueId counts,
                            const LoadBalancingLossAttributes& attributes, const std::string& name,
                            const ValidTokens& valid) {
  return builder.emit(kLoadBalancingLoss, Attributes(attributes),
                      router_loss_inputs({logits, counts}, valid), name)[0];
}

const OpSpec kLoadBalancingLoss{
    .name = "load_balancing_loss",
    .infer = infer_load_balancing_loss,
    .differentiate = differentiate_load_balancing_loss,
    .cost = cost_load_balancing_loss,
    .cpu = {.kernel = load_balancing_loss_kernel,
            .workspace = router_loss_workspace_bytes,
            .scratch = router_loss_scratch_bytes},
    .cuda =
        only_kernel<TROUPE_CUDA(load_balancing_loss_cuda_kernel), router_loss_cuda_scratch_bytes>,
    .print_attributes = print_load_balancing_loss,
    .samples = samples_load_balancing_loss};

const OpSpec kLoadBalancingLossGradient{
    .name = "load_balancing_loss_gradient",
    .infer = infer_load_balancing_loss_gradient,
    .cost = cost_load_balancing_loss_gradient,
    .cpu = {.kernel = load_balancing_loss_gradient_kernel},
    .cuda = only_kernel<TROUPE_CUDA(load_balancing_loss_gradient_cuda_kernel)>,
    .print_attributes = print_load_balancing_loss};

}  // namespace troupe
