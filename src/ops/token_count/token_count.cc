#include "ops/token_count/token_count.h"

#include <fmt/format.h>
#include <vector>

#include "program/op_sample.h"

namespace troupe {

CpuKernel token_count_cpu_kernel(const OpView& op);
CpuKernel token_share_cpu_kernel(const OpView& op);
CudaKernel token_count_cuda_kernel(const OpView& op);
CudaKernel token_share_cuda_kernel(const OpView& op);

namespace {

void infer_token_count(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "token_count takes a mask");
  const Value& mask = context.input(0);
  TROUPE_CHECK((mask.dtype == DType::f64 || mask.dtype == DType::f32) && mask.shape.rank() == 1 &&
                   !mask.rows.valid(),
               "token_count: mask " + mask.name + " " + mask.shape.to_string());
  context.output("", mask.dtype, {1});
}

Cost cost_token_count(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes())};
}

std::vector<OpSample> samples_token_count() {
  const auto of = [](const std::vector<double>& weights) {
    return [=](SampleBuilder& sample) {
      const ValueId mask = sample.values("mask", {static_cast<int64_t>(weights.size())}, weights,
                                         {.differentiable = false, .accumulation = true});
      sample.result_without_gradient(token_count(sample.builder(), mask, "count"));
    };
  };
  return {{"one", of({1})}, {"none", of({0, 0})}, {"some", of({1, 0, 1, 0.5, 1})}};
}

void infer_token_share(InferContext& context) {
  const Value& tokens = context.input(0);
  TROUPE_CHECK(
      (tokens.dtype == DType::f64 || tokens.dtype == DType::f32) && tokens.shape == Shape({1}),
      "token_share: not a count: " + tokens.name + " " + tokens.shape.to_string());
  context.output("", tokens.dtype, {1});
}

Cost cost_token_share(const OpView& op) {
  return {.flops = 1, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

std::string print_token_share(const Attributes& attributes) {
  return fmt::format("numerator={}", attributes.as<TokenShareAttributes>().numerator);
}

std::vector<OpSample> samples_token_share() {
  const auto of = [](double tokens) {
    return [=](SampleBuilder& sample) {
      const ValueId count =
          sample.values("tokens", {1}, {tokens}, {.differentiable = false, .accumulation = true});
      sample.result_without_gradient(
          token_share(sample.builder(), count, {.numerator = 12}, "share"));
    };
  };
  return {{"some", of(48)}, {"none", of(0)}};
}

}  // namespace

ValueId token_share(Builder& builder, ValueId tokens, const TokenShareAttributes& attributes,
                    const std::string& name) {
  return builder.emit(kTokenShare, Attributes(attributes), {tokens}, name)[0];
}

ValueId token_count(Builder& builder, ValueId mask, const std::string& name) {
  return builder.emit(kTokenCount, Attributes(NoAttributes()), {mask}, name)[0];
}

const OpSpec kTokenCount{.name = "token_count",
                         .infer = infer_token_count,
                         .cost = cost_token_count,
                         .cpu_kernel = token_count_cpu_kernel,
                         .cuda_kernel = TROUPE_CUDA(token_count_cuda_kernel),
                         .samples = samples_token_count};

const OpSpec kTokenShare{.name = "token_share",
                         .infer = infer_token_share,
                         .cost = cost_token_share,
                         .cpu_kernel = token_share_cpu_kernel,
                         .cuda_kernel = TROUPE_CUDA(token_share_cuda_kernel),
                         .print_attributes = print_token_share,
                         .samples = samples_token_share};

}  // namespace troupe
