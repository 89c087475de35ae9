#include "ops/cross_entropy/cross_entropy.h"

#include "ops/cross_entropy/cross_entropy_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {
namespace {

void check_cross_entropy_inputs(const InferContext& context) {
  const Value& logits = context.input(0);
  const Value& labels = context.input(1);
  const Value& mask = context.input(2);
  TROUPE_CHECK(is_float(logits.dtype) && logits.shape.rank() == 2 && !logits.rows.valid(),
               "cross_entropy: logits " + logits.shape.to_string());
  const Shape tokens{logits.shape[0]};
  TROUPE_CHECK(labels.dtype == DType::i32 && labels.shape == tokens,
               "cross_entropy: labels " + labels.shape.to_string());
  TROUPE_CHECK(mask.dtype == accumulation_dtype(logits.dtype) && mask.shape == tokens,
               "cross_entropy: mask " + mask.shape.to_string());
}

void infer_cross_entropy(InferContext& context) {
  check_cross_entropy_inputs(context);
  const int64_t tokens = context.input(0).shape[0];
  const DType accumulation = accumulation_dtype(context.input(0).dtype);
  context.output("", accumulation, {1});
  context.output("lse", accumulation, {tokens});
}

void infer_cross_entropy_gradient(InferContext& context) {
  check_cross_entropy_inputs(context);
  const Value& logits = context.input(0);
  const Value& lse = context.input(3);
  const Value& d_loss = context.input(4);
  const DType accumulation = accumulation_dtype(logits.dtype);
  TROUPE_CHECK(lse.dtype == accumulation && lse.shape == Shape({logits.shape[0]}),
               "cross_entropy_gradient: lse " + lse.shape.to_string());
  TROUPE_CHECK(d_loss.dtype == accumulation && d_loss.shape == Shape({1}),
               "cross_entropy_gradient: d_loss " + d_loss.shape.to_string());
  context.output("", logits.dtype, logits.shape);
}

void differentiate_cross_entropy(DerivativeContext& context) {
  TROUPE_CHECK(!context.output_gradient(1).valid(), "cross_entropy: no gradient flows through lse");
  if (!context.wants(0)) return;
  context.add_gradient(0,
                       context.builder().emit(kCrossEntropyGradient, Attributes(NoAttributes()),
                                              {context.input(0), context.input(1), context.input(2),
                                               context.output(1), context.output_gradient(0)},
                                              "d_" + context.input_name(0))[0]);
}

// Per element: comparison, subtraction, exponential (counted as one) and sum.
Cost cost_cross_entropy(const OpView& op) {
  const Value& logits = op.input(0);
  const double tokens = static_cast<double>(logits.shape[0]);
  const double token_bytes =
      static_cast<double>(2 * size_of(op.output(1).dtype) + size_of(DType::i32));
  return {.flops = 4 * static_cast<double>(logits.shape.elements()),
          .bytes = static_cast<double>(logits.bytes()) + tokens * token_bytes};
}

// Per element: subtraction, exponential and product.
Cost cost_cross_entropy_gradient(const OpView& op) {
  const Value& logits = op.input(0);
  const double tokens = static_cast<double>(logits.shape[0]);
  const double token_bytes =
      static_cast<double>(2 * size_of(op.input(3).dtype) + size_of(DType::i32));
  return {.flops = 3 * static_cast<double>(logits.shape.elements()),
          .bytes = 2 * static_cast<double>(logits.bytes()) + tokens * token_bytes};
}

// The loss of every token.
uint64_t workspace_cross_entropy(const OpView& op) {
  return static_cast<uint64_t>(op.input(0).shape[0]) * sizeof(double);
}

std::vector<OpSample> samples_cross_entropy() {
  struct Data {
    int64_t vocabulary;
    std::vector<int32_t> labels;
    std::vector<double> mask;
    bool wide = false;       // logits in the accumulation dtype
    double deviation = 1.0;  // of the logits
  };
  const auto with = [](const Data& data) {
    return [=](SampleBuilder& sample) {
      const auto tokens = static_cast<int64_t>(data.labels.size());
      SampleBuilder::Options logits;
      logits.accumulation = data.wide;
      logits.deviation = data.deviation;
      SampleBuilder::Options mask;
      mask.accumulation = true;
      mask.differentiable = false;
      const CrossEntropyResult result = cross_entropy(
          sample.builder(), sample.tensor("logits", {tokens, data.vocabulary}, logits),
          sample.integers("labels", {tokens}, data.labels),
          sample.values("mask", {tokens}, data.mask, mask), "loss");
      sample.result(result.loss);
      sample.result_without_gradient(result.lse);
    };
  };
  return {{"all_tokens", with({19, {0, 18, 7, 7, 3}, {1, 1, 1, 1, 1}})},
          {"masked", with({33, {5, -1, 32, 99, 0, 12}, {1, 0, 1, 0, 1, 1}})},
          {"weighted", with({16, {1, 2, 15}, {0.5, 2, 1.25}})},
          {"nothing_counts", with({5, {0, -100}, {0, 0}})},
          {"less_than_one_token", with({6, {2, 4}, {0.25, 0.5}})},
          {"one_by_one", with({1, {0}, {1}})},
          {"large_logits", with({24, {3, 23, 11}, {1, 1, 1}, false, 8.0})},
          {"accumulation_logits", with({21, {20, 4, 0, 9}, {1, 1, 0, 1}, true})}};
}

}  // namespace

CrossEntropyResult cross_entropy(Builder& builder, ValueId logits, ValueId labels, ValueId mask,
                                 const std::string& name) {
  const auto outputs =
      builder.emit(kCrossEntropy, Attributes(NoAttributes()), {logits, labels, mask}, name);
  return {.loss = outputs[0], .lse = outputs[1]};
}

const OpSpec kCrossEntropy{.name = "cross_entropy",
                           .infer = infer_cross_entropy,
                           .differentiate = differentiate_cross_entropy,
                           .cost = cost_cross_entropy,
                           .cpu_kernel = cross_entropy_cpu_kernel,
                           .workspace_bytes = workspace_cross_entropy,
                           .samples = samples_cross_entropy};

const OpSpec kCrossEntropyGradient{.name = "cross_entropy_gradient",
                                   .infer = infer_cross_entropy_gradient,
                                   .cost = cost_cross_entropy_gradient,
                                   .cpu_kernel = cross_entropy_gradient_cpu_kernel,
                                   .in_place = {.output = 0, .input = 0}};

}  // namespace troupe
