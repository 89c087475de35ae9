#include "ops/losses/cross_entropy/cross_entropy.h"

#include "ops/choose_kernel.h"
#include "ops/losses/cross_entropy/cross_entropy_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel cross_entropy_cuda_kernel(const OpView& op);
CudaKernel cross_entropy_part_cuda_kernel(const OpView& op);
CudaKernel cross_entropy_of_parts_cuda_kernel(const OpView& op);
CudaKernel cross_entropy_gradient_cuda_kernel(const OpView& op);

namespace {

// Of each token and part: the largest logit, the sum, the label's logit.
constexpr int64_t kPartNumbers = 3;

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

// Input `i`, where it is present: the number of tokens.
void check_token_count(const InferContext& context, int i) {
  if (!context.has_input(i)) return;
  const Value& tokens = context.input(i);
  TROUPE_CHECK(
      tokens.dtype == accumulation_dtype(context.input(0).dtype) && tokens.shape == Shape({1}),
      "cross_entropy: tokens " + tokens.shape.to_string());
}

void infer_cross_entropy(InferContext& context) {
  check_cross_entropy_inputs(context);
  check_token_count(context, 3);
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
  check_token_count(context, 5);
  context.output("", logits.dtype, logits.shape);
}

void infer_cross_entropy_part(InferContext& context) {
  const Value& logits = context.input(0);
  const Value& labels = context.input(1);
  TROUPE_CHECK(is_float(logits.dtype) && logits.shape.rank() == 2 && !logits.rows.valid() &&
                   labels.dtype == DType::i32 && labels.shape == Shape({logits.shape[0]}),
               "cross_entropy_part: logits " + logits.shape.to_string());
  context.output("", accumulation_dtype(logits.dtype), {logits.shape[0], kPartNumbers});
}

void infer_cross_entropy_of_parts(InferContext& context) {
  check_cross_entropy_inputs(context);
  const int64_t tokens = context.input(0).shape[0];
  const DType accumulation = accumulation_dtype(context.input(0).dtype);
  const Value& parts = context.input(3);
  TROUPE_CHECK(parts.dtype == accumulation && parts.shape.rank() == 2 &&
                   parts.shape[0] % tokens == 0 && parts.shape[1] == kPartNumbers,
               "cross_entropy_of_parts: parts " + parts.shape.to_string());
  check_token_count(context, 4);
  context.output("", accumulation, {1});
  context.output("lse", accumulation, {tokens});
}

// `tokens`: which input holds their number.
void differentiate_loss(DerivativeContext& context, int tokens) {
  TROUPE_CHECK(!context.output_gradient(1).valid(), "cross_entropy: no gradient flows through lse");
  if (!context.wants(0)) return;
  context.add_gradient(
      0,
      context.builder().emit(kCrossEntropyGradient, Attributes(NoAttributes()),
                             {context.input(0), context.input(1), context.input(2),
                              context.output(1), context.output_gradient(0), context.input(tokens)},
                             "d_" + context.input_name(0))[0]);
}

void differentiate_cross_entropy_of_parts(DerivativeContext& context) {
  differentiate_loss(context, 4);
}

void differentiate_cross_entropy(DerivativeContext& context) {
  differentiate_loss(context, 3);
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

Cost cost_cross_entropy_part(const OpView& op) {
  return {.flops = 4 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes() +
                                       op.output(0).bytes())};
}

// Per number of a part: an exponential, a product and a sum, about.
Cost cost_cross_entropy_of_parts(const OpView& op) {
  return {.flops = static_cast<double>(op.input(3).shape.elements()),
          .bytes = static_cast<double>(op.input(2).bytes() + op.input(3).bytes() +
                                       op.output(1).bytes())};
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

uint64_t cross_entropy_cuda_scratch_bytes(const OpView& op) {
  return static_cast<uint64_t>(op.input(0).shape[0]) * sizeof(double);
}

std::vector<OpSample> samples_cross_entropy() {
  struct Data {
    int64_t vocabulary;
    std::vector<int32_t> labels;
    std::vector<double> mask;
    bool wide = false;       // logits in the accumulation dtype
    double deviation = 1.0;  // of the logits
    double tokens = 0;       // 0: those of the mask
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
      const CrossEntropyInputs inputs{
          .logits = sample.tensor("logits", {tokens, data.vocabulary}, logits),
          .labels = sample.integers("labels", {tokens}, data.labels),
          .mask = sample.values("mask", {tokens}, data.mask, mask),
          .tokens =
              data.tokens > 0 ? sample.values("tokens", {1}, {data.tokens}, mask) : ValueId{}};
      const CrossEntropyResult result = cross_entropy(sample.builder(), inputs, "loss");
      sample.result(result.loss);
      sample.result_without_gradient(result.lse);
    };
  };
  return {{"all_tokens", with({19, {0, 18, 7, 7, 3}, {1, 1, 1, 1, 1}})},
          {"masked", with({33, {5, -1, 32, 99, 0, 12}, {1, 0, 1, 0, 1, 1}})},
          {"weighted", with({16, {1, 2, 15}, {0.5, 2, 1.25}})},
          {"part_of_the_tokens", with({9, {8, 0, 4}, {1, 0, 1}, false, 1.0, 7})},
          {"nothing_counts", with({5, {0, -100}, {0, 0}})},
          {"less_than_one_token", with({6, {2, 4}, {0.25, 0.5}})},
          {"one_by_one", with({1, {0}, {1}})},
          {"large_logits", with({24, {3, 23, 11}, {1, 1, 1}, false, 8.0})},
          {"accumulation_logits", with({21, {20, 4, 0, 9}, {1, 1, 0, 1}, true})}};
}

// All of the vocabulary as the only part.
std::vector<OpSample> samples_cross_entropy_of_parts() {
  const auto with = [](int64_t vocabulary, const std::vector<int32_t>& labels,
                       const std::vector<double>& counts, double tokens) {
    return [=](SampleBuilder& sample) {
      const auto rows = static_cast<int64_t>(labels.size());
      SampleBuilder::Options constant;
      constant.accumulation = true;
      constant.differentiable = false;
      const CrossEntropyInputs inputs{
          .logits = sample.tensor("logits", {rows, vocabulary}),
          .labels = sample.integers("labels", {rows}, labels),
          .mask = sample.values("mask", {rows}, counts, constant),
          .tokens = tokens > 0 ? sample.values("tokens", {1}, {tokens}, constant) : ValueId{}};
      const ValueId part =
          cross_entropy_part(sample.builder(), inputs.logits, inputs.labels, "part");
      const CrossEntropyResult result =
          cross_entropy_of_parts(sample.builder(), inputs, part, "loss");
      sample.result(result.loss);
      sample.result_without_gradient(result.lse);
    };
  };
  return {{"all_tokens", with(19, {0, 18, 7}, {1, 1, 1}, 0)},
          {"labels_of_other_parts", with(6, {-3, 5, 6}, {1, 1, 1}, 0)},
          {"weighted", with(16, {1, 2, 15}, {0.5, 2, 1.25}, 0)},
          {"part_of_the_tokens", with(9, {8, 0, 4}, {1, 0, 1}, 7)}};
}

}  // namespace

CrossEntropyResult cross_entropy(Builder& builder, const CrossEntropyInputs& inputs,
                                 const std::string& name) {
  const auto outputs =
      builder.emit(kCrossEntropy, Attributes(NoAttributes()),
                   {inputs.logits, inputs.labels, inputs.mask, inputs.tokens}, name);
  return {.loss = outputs[0], .lse = outputs[1]};
}

ValueId cross_entropy_part(Builder& builder, ValueId logits, ValueId labels,
                           const std::string& name) {
  return builder.emit(kCrossEntropyPart, Attributes(NoAttributes()), {logits, labels}, name)[0];
}

CrossEntropyResult cross_entropy_of_parts(Builder& builder, const CrossEntropyInputs& inputs,
                                          ValueId parts, const std::string& name) {
  const auto outputs =
      builder.emit(kCrossEntropyOfParts, Attributes(NoAttributes()),
                   {inputs.logits, inputs.labels, inputs.mask, parts, inputs.tokens}, name);
  return {.loss = outputs[0], .lse = outputs[1]};
}

const OpSpec kCrossEntropy{
    .name = "cross_entropy",
    .infer = infer_cross_entropy,
    .differentiate = differentiate_cross_entropy,
    .cost = cost_cross_entropy,
    .cpu = {.kernel = cross_entropy_cpu_kernel, .workspace = workspace_cross_entropy},
    .cuda = packs_kernel<TROUPE_CUDA(cross_entropy_cuda_kernel), row_elements_of_input,
                         cross_entropy_cuda_scratch_bytes>,
    .samples = samples_cross_entropy};

const OpSpec kCrossEntropyPart{
    .name = "cross_entropy_part",
    .infer = infer_cross_entropy_part,
    .cost = cost_cross_entropy_part,
    .cpu = {.kernel = cross_entropy_part_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(cross_entropy_part_cuda_kernel), row_elements_of_input>};

const OpSpec kCrossEntropyOfParts{
    .name = "cross_entropy_of_parts",
    .infer = infer_cross_entropy_of_parts,
    .differentiate = differentiate_cross_entropy_of_parts,
    .cost = cost_cross_entropy_of_parts,
    .cpu = {.kernel = cross_entropy_of_parts_cpu_kernel, .workspace = workspace_cross_entropy},
    .cuda = only_kernel<TROUPE_CUDA(cross_entropy_of_parts_cuda_kernel),
                        cross_entropy_cuda_scratch_bytes>,
    .samples = samples_cross_entropy_of_parts};

const OpSpec kCrossEntropyGradient{
    .name = "cross_entropy_gradient",
    .infer = infer_cross_entropy_gradient,
    .cost = cost_cross_entropy_gradient,
    .cpu = {.kernel = cross_entropy_gradient_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(cross_entropy_gradient_cuda_kernel), row_elements_of_input,
                         cross_entropy_cuda_scratch_bytes>,
    .in_place = {.output = 0, .input = 0}};

}  // namespace troupe
