#include "ops/load_balancing_loss/load_balancing_loss.h"

#include <fmt/format.h>
#include <vector>

#include "ops/load_balancing_loss/load_balancing_loss_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel load_balancing_loss_cpu_kernel(DType dtype);
CpuKernel load_balancing_loss_gradient_cpu_kernel(DType dtype);

namespace {

void check_load_balancing_inputs(const InferContext& context) {
  const Value& logits = context.input(0);
  const Value& counts = context.input(1);
  TROUPE_CHECK((logits.dtype == DType::f32 || logits.dtype == DType::f64) &&
                   logits.shape.rank() == 2 && !logits.rows.valid(),
               "load_balancing_loss needs f32 or f64 logits [T, E]: " + logits.name);
  TROUPE_CHECK(counts.dtype == DType::i32 && counts.shape == Shape({logits.shape[1]}),
               "load_balancing_loss needs i32 counts [E]: " + counts.name);
  TROUPE_CHECK(
      context.attributes<LoadBalancingLossAttributes>().score_function == ScoreFunction::softmax,
      "load_balancing_loss knows softmax scores only");
  const auto top_k = context.attributes<LoadBalancingLossAttributes>().top_k;
  TROUPE_CHECK(top_k >= 1 && top_k <= logits.shape[1],
               "load_balancing_loss: top_k is between 1 and E");
}

void infer_load_balancing_loss(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "load_balancing_loss takes logits, counts");
  check_load_balancing_inputs(context);
  const DType dtype = context.input(0).dtype;
  context.output("", dtype, {1});
}

void infer_load_balancing_loss_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3,
               "load_balancing_loss_gradient takes logits, counts, d_loss");
  check_load_balancing_inputs(context);
  const DType dtype = context.input(0).dtype;
  const Shape shape = context.input(0).shape;
  TROUPE_CHECK(
      context.input(2).dtype == dtype && context.input(2).shape == Shape({1}),
      "load_balancing_loss_gradient: d_loss is [1] of the logits' dtype: " + context.input(2).name);
  context.output("", dtype, shape);
}

void differentiate_load_balancing_loss(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto attributes = context.attributes<LoadBalancingLossAttributes>();
  const ValueId gradient =
      context.builder().emit(kLoadBalancingLossGradient, Attributes(attributes),
                             {context.input(0), context.input(1), context.output_gradient(0)},
                             "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

// A maximum, an exponential, its sum and a product with the counts for each logit.
Cost cost_load_balancing_loss(const OpView& view) {
  return {.flops = 5 * static_cast<double>(view.input(0).shape.elements()),
          .bytes = static_cast<double>(view.input(0).bytes() + view.input(1).bytes())};
}

Cost cost_load_balancing_loss_gradient(const OpView& view) {
  return {.flops = 8 * static_cast<double>(view.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * view.input(0).bytes() + view.input(1).bytes())};
}

CpuKernel load_balancing_loss_kernel(const OpView& view) {
  return load_balancing_loss_cpu_kernel(view.input(0).dtype);
}

CpuKernel load_balancing_loss_gradient_kernel(const OpView& view) {
  return load_balancing_loss_gradient_cpu_kernel(view.input(0).dtype);
}

uint64_t load_balancing_loss_workspace_bytes(const OpView& view) {
  const Shape& shape = view.input(0).shape;
  return static_cast<uint64_t>(load_balancing_chunks(shape[0], shape[1])) * sizeof(double);
}

// The exponentials of one token.
uint64_t load_balancing_loss_scratch_bytes(const OpView& view) {
  const Value& logits = view.input(0);
  return static_cast<uint64_t>(logits.shape[1]) * size_of(logits.dtype);
}

std::string print_load_balancing_loss(const Attributes& attributes) {
  const auto& a = attributes.as<LoadBalancingLossAttributes>();
  return fmt::format("coefficient={} top_k={} score={}", a.coefficient, a.top_k,
                     name_of(a.score_function));
}

OpSample sample_load_balancing_loss(const std::string& name, int64_t tokens,
                                    const std::vector<int32_t>& counts,
                                    const LoadBalancingLossAttributes& attributes) {
  return {name, [=](SampleBuilder& sample) {
            const auto experts = static_cast<int64_t>(counts.size());
            SampleBuilder::Options options;
            options.accumulation = true;
            const ValueId logits = sample.tensor("logits", {tokens, experts}, options);
            const ValueId n = sample.integers("counts", {experts}, counts);
            sample.result(load_balancing_loss(sample.builder(), logits, n, attributes, "loss"));
          }};
}

std::vector<OpSample> samples_load_balancing_loss() {
  return {
      sample_load_balancing_loss("an expert without tokens", 6, {5, 0, 3, 4},
                                 {.coefficient = 1, .top_k = 2}),
      sample_load_balancing_loss("more experts than lanes", 10,
                                 {1, 2, 0, 3, 1, 1, 0, 0, 2, 1, 4, 1, 0, 1, 0, 1, 2, 0, 1, 9},
                                 {.coefficient = 0.5, .top_k = 3}),
      sample_load_balancing_loss("one token", 1, {0, 1, 0}, {.coefficient = 2, .top_k = 1}),
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
                            const LoadBalancingLossAttributes& attributes,
                            const std::string& name) {
  return builder.emit(kLoadBalancingLoss, Attributes(attributes), {logits, counts}, name)[0];
}

const OpSpec kLoadBalancingLoss{.name = "load_balancing_loss",
                                .infer = infer_load_balancing_loss,
                                .differentiate = differentiate_load_balancing_loss,
                                .cost = cost_load_balancing_loss,
                                .cpu_kernel = load_balancing_loss_kernel,
                                .workspace_bytes = load_balancing_loss_workspace_bytes,
                                .scratch_bytes = load_balancing_loss_scratch_bytes,
                                .print_attributes = print_load_balancing_loss,
                                .samples = samples_load_balancing_loss};

const OpSpec kLoadBalancingLossGradient{.name = "load_balancing_loss_gradient",
                                        .infer = infer_load_balancing_loss_gradient,
                                        .cost = cost_load_balancing_loss_gradient,
                                        .cpu_kernel = load_balancing_loss_gradient_kernel,
                                        .print_attributes = print_load_balancing_loss};

}  // namespace troupe
