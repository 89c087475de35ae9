#include "ops/losses/token_count/token_count.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel token_count_cpu_kernel(const OpView& op);
CpuKernel token_share_cpu_kernel(const OpView& op);
CpuKernel token_mean_cpu_kernel(const OpView& op);
CudaKernel token_count_cuda_kernel(const OpView& op);
CudaKernel token_share_cuda_kernel(const OpView& op);
CudaKernel token_mean_cuda_kernel(const OpView& op);

namespace {

void infer_token_count(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "token_count takes a mask");
  const Value& mask = context.input(0);
  TROUPE_CHECK((mask.dtype == DType::f64 || mask.dtype == DType::f32 || mask.dtype == DType::i32) &&
                   mask.shape.rank() == 1 && !mask.rows.valid(),
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
  return {{"one", of({1})},
          {"none", of({0, 0})},
          {"some", of({1, 0, 1, 0.5, 1})},
          {"integers", [](SampleBuilder& sample) {
             const ValueId mask = sample.integers("mask", {5}, {1, 0, 1, 1, 0});
             sample.result_without_gradient(token_count(sample.builder(), mask, "count"));
           }}};
}

void infer_token_share(InferContext& context) {
  const Value& tokens = context.input(0);
  TROUPE_CHECK(
      (tokens.dtype == DType::f64 || tokens.dtype == DType::f32) && tokens.shape == Shape({1}),
      "token_share: not a count: " + tokens.name + " " + tokens.shape.to_string());
  const DType dtype = context.attributes<TokenShareAttributes>().dtype;
  TROUPE_CHECK(dtype == DType::f64 || dtype == DType::f32, "token_share: a share is f32 or f64");
  TROUPE_CHECK(context.input_count() == 1 ||
                   (context.input(1).dtype == DType::i32 && context.input(1).shape == Shape({1})),
               "token_share: the part is i32 [1]");
  context.output("", dtype, {1});
}

Cost cost_token_share(const OpView& op) {
  return {.flops = 1, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

std::string print_token_share(const Attributes& attributes) {
  const auto& values = attributes.as<TokenShareAttributes>();
  return fmt::format("numerator={} dtype={}", values.numerator, name_of(values.dtype));
}

std::vector<OpSample> samples_token_share() {
  const auto of = [](double tokens, DType dtype) {
    return [=](SampleBuilder& sample) {
      const ValueId count =
          sample.values("tokens", {1}, {tokens}, {.differentiable = false, .accumulation = true});
      sample.result_without_gradient(
          token_share(sample.builder(), count, {.numerator = 12, .dtype = dtype}, "share"));
    };
  };
  const auto part = [](SampleBuilder& sample) {
    const ValueId count =
        sample.values("tokens", {1}, {48}, {.differentiable = false, .accumulation = true});
    sample.result_without_gradient(token_share(sample.builder(), count, {.dtype = DType::f64},
                                               "share", sample.integers("part", {1}, {7})));
  };
  return {{"some", of(48, DType::f32)},
          {"none", of(0, DType::f32)},
          {"wide", of(48, DType::f64)},
          {"part", part}};
}

void infer_token_mean(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "token_mean takes a sum and a count");
  for (int i = 0; i < 2; ++i) {
    const Value& input = context.input(i);
    TROUPE_CHECK(input.dtype == DType::f64 && input.shape == Shape({1}),
                 "token_mean: not f64 [1]: " + input.name + " " + input.shape.to_string());
  }
  context.mutates(0);
}

Cost cost_token_mean(const OpView&) {
  return {.flops = 1, .bytes = 3 * sizeof(double)};
}

std::vector<OpSample> samples_token_mean() {
  const auto of = [](double tokens) {
    return [=](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      const ValueId sum = builder.metric("sum", DType::f64, {1});
      const ValueId count = builder.metric("count", DType::f64, {1});
      const auto store = [&](ValueId target, double value) {
        accumulate(
            builder, target,
            sample.values("value", {1}, {value}, {.differentiable = false, .accumulation = true}),
            1, /*overwrite=*/true);
      };
      store(sum, 6);
      store(count, tokens);
      token_mean(builder, sum, count);
      sample.result_without_gradient(sum);
    };
  };
  return {{"some", of(48)}, {"none", of(0)}};
}

}  // namespace

ValueId token_share(Builder& builder, ValueId tokens, const TokenShareAttributes& attributes,
                    const std::string& name, ValueId part) {
  std::vector<ValueId> inputs = {tokens};
  if (part.valid()) inputs.push_back(part);
  return builder.emit(kTokenShare, Attributes(attributes), inputs, name)[0];
}

ValueId token_count(Builder& builder, ValueId mask, const std::string& name) {
  return builder.emit(kTokenCount, Attributes(NoAttributes()), {mask}, name)[0];
}

void token_mean(Builder& builder, ValueId sum, ValueId tokens) {
  const std::string name = builder.value(sum).name;
  builder.emit(kTokenMean, Attributes(NoAttributes()), {sum, tokens}, name);
}

const OpSpec kTokenCount{.name = "token_count",
                         .infer = infer_token_count,
                         .cost = cost_token_count,
                         .cpu = {.kernel = token_count_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(token_count_cuda_kernel)>,
                         .samples = samples_token_count};

const OpSpec kTokenShare{.name = "token_share",
                         .infer = infer_token_share,
                         .cost = cost_token_share,
                         .cpu = {.kernel = token_share_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(token_share_cuda_kernel)>,
                         .print_attributes = print_token_share,
                         .samples = samples_token_share};

const OpSpec kTokenMean{.name = "token_mean",
                        .infer = infer_token_mean,
                        .cost = cost_token_mean,
                        .cpu = {.kernel = token_mean_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(token_mean_cuda_kernel)>,
                        .samples = samples_token_mean};

}  // namespace troupe
