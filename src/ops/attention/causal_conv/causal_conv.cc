#include "ops/attention/causal_conv/causal_conv.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/causal_conv/causal_conv_pieces.h"
#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel causal_conv_cpu_kernel(const OpView& op);
CpuKernel causal_conv_gradient_cpu_kernel(const OpView& op);
CpuKernel causal_conv_weight_gradient_cpu_kernel(const OpView& op);
CudaKernel causal_conv_cuda_kernel(const OpView& op);
CudaKernel causal_conv_gradient_cuda_kernel(const OpView& op);
CudaKernel causal_conv_weight_gradient_cuda_kernel(const OpView& op);

namespace {

// Inputs x, w, starts and before from `first` on.
void check_causal_conv(const InferContext& context, int first) {
  const Value& x = context.input(first);
  const Value& w = context.input(first + 1);
  const int32_t sequence = context.attributes<CausalConvAttributes>().sequence;
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid() && sequence > 0 &&
                   x.shape[0] % sequence == 0,
               "causal_conv: x is not [B S, C]: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK(w.dtype == accumulation_dtype(x.dtype) && w.shape.rank() == 2 &&
                   w.shape[0] == x.shape[1] && w.shape[1] > 0 && w.shape[1] <= kMostTaps,
               "causal_conv: w is not [C, K] in the accumulation dtype: " + w.name + " " +
                   w.shape.to_string());
  if (context.has_input(first + 2)) {
    const Value& starts = context.input(first + 2);
    TROUPE_CHECK(starts.dtype == DType::i32 && starts.shape == Shape({x.shape[0]}),
                 "causal_conv: starts is not i32 [T]: " + starts.name);
  }
  if (!context.has_input(first + 3)) return;
  const Value& before = context.input(first + 3);
  const int64_t earlier = w.shape[1] - 1;
  TROUPE_CHECK(
      earlier > 0 && before.dtype == x.dtype &&
          before.shape == Shape({x.shape[0] / sequence * earlier, x.shape[1]}),
      "causal_conv: before is not [B (K - 1), C]: " + before.name + " " + before.shape.to_string());
}

void check_result(const InferContext& context) {
  const Value& dy = context.input(0);
  const Value& x = context.input(1);
  TROUPE_CHECK(dy.dtype == x.dtype && dy.shape == x.shape && !dy.rows.valid(),
               "causal_conv: dy does not belong to " + x.name);
}

void infer_causal_conv(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "causal_conv: takes x, w, starts and before");
  check_causal_conv(context, 0);
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape);
}

void infer_causal_conv_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "causal_conv_gradient: takes dy, x, w, starts and before");
  check_causal_conv(context, 1);
  check_result(context);
  const Value x = context.input(1);
  context.output("", x.dtype, x.shape);
  if (!context.has_input(4)) return;
  const Value before = context.input(4);
  context.output("d_before", before.dtype, before.shape);
}

void infer_causal_conv_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6,
               "causal_conv_weight_gradient: takes dy, x, w, starts, before and target");
  check_causal_conv(context, 1);
  check_result(context);
  declare_weight_gradient(context, 5, "", context.input(2).dtype, context.input(2).shape);
}

void differentiate_causal_conv(DerivativeContext& context) {
  Builder& builder = context.builder();
  CausalConvAttributes attributes = context.attributes<CausalConvAttributes>();
  const ValueId dy = context.output_gradient(0);
  const ValueId starts = context.input(2);
  const ValueId before = context.input(3);
  if (context.wants(0) || context.wants(3)) {
    const auto gradients = builder.emit(kCausalConvGradient, Attributes(attributes),
                                        {dy, context.input(0), context.input(1), starts, before},
                                        "d_" + context.input_name(0));
    if (context.wants(0)) context.add_gradient(0, gradients[0]);
    if (context.wants(3)) context.add_gradient(3, gradients[1]);
  }
  if (!context.wants(1)) return;
  const auto target = context.weight_target(1);
  attributes.accumulate = target.accumulate;
  context.add_weight_gradient(
      1, builder.emit(kCausalConvWeightGradient, Attributes(attributes),
                      {dy, context.input(0), context.input(1), starts, before, target.target},
                      "d_" + context.input_name(1))[0]);
}

double earlier_bytes(const OpView& op, int before) {
  return op.has_input(before) ? static_cast<double>(op.input(before).bytes()) : 0;
}

// Of a tap a multiply-add; of SiLU four operations, of its derivative seven.
Cost cost_causal_conv(const OpView& op) {
  const auto taps = static_cast<double>(op.input(1).shape[1]);
  return {.flops = (2 * taps + 4) * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(1).bytes()) +
                   earlier_bytes(op, 3)};
}

Cost cost_causal_conv_gradient(const OpView& op) {
  const auto taps = static_cast<double>(op.input(2).shape[1]);
  return {.flops = (4 * taps + 7) * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(3 * op.input(0).bytes() + op.input(2).bytes()) +
                   2 * earlier_bytes(op, 4)};
}

Cost cost_causal_conv_weight_gradient(const OpView& op) {
  const auto taps = static_cast<double>(op.input(2).shape[1]);
  return {.flops = (4 * taps + 7) * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(2).bytes() +
                                       op.output(0).bytes()) +
                   earlier_bytes(op, 4)};
}

std::string print_causal_conv(const Attributes& attributes) {
  const auto& values = attributes.as<CausalConvAttributes>();
  return fmt::format("sequence={}{}", values.sequence, values.accumulate ? " accumulate=1" : "");
}

uint64_t causal_conv_scratch_bytes(const OpView& op) {
  return static_cast<uint64_t>(conv_pieces(op.input(0).shape[0])) *
         static_cast<uint64_t>(op.input(2).shape.elements()) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

std::vector<OpSample> samples_causal_conv() {
  const auto conv = [](int64_t rows, int64_t columns, int64_t taps, int32_t sequence,
                       bool differentiable_x = true) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, columns}, {.differentiable = differentiable_x});
      const ValueId w = sample.tensor("w", {columns, taps}, {.accumulation = true});
      sample.result(causal_conv(sample.builder(), x, w, {}, {.sequence = sequence}, "y"));
    };
  };
  const auto documents = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {12, 5});
    const ValueId w = sample.tensor("w", {5, 4}, {.accumulation = true});
    const ValueId starts = sample.integers("starts", {12}, {0, 0, 2, 2, 2, 5, 0, 1, 1, 1, 1, 1});
    sample.result(causal_conv(sample.builder(), x, w, {.starts = starts}, {.sequence = 6}, "y"));
  };
  const auto goes_on = [](int64_t rows, int64_t columns, int64_t taps, int32_t sequence,
                          const std::vector<int32_t>& starts) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, columns});
      const ValueId w = sample.tensor("w", {columns, taps}, {.accumulation = true});
      const ValueId before = sample.tensor("before", {rows / sequence * (taps - 1), columns});
      const ValueId begin = starts.empty() ? ValueId{} : sample.integers("starts", {rows}, starts);
      sample.result(causal_conv(sample.builder(), x, w, {begin, before}, {sequence}, "y"));
    };
  };
  // Two uses of one weight: the second gradient is added to the first.
  const auto twice = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {4, 3});
    const ValueId w = sample.tensor("w", {3, 2}, {.accumulation = true});
    const ValueId once = causal_conv(sample.builder(), x, w, {}, {.sequence = 4}, "once");
    sample.result(causal_conv(sample.builder(), once, w, {}, {.sequence = 4}, "y"));
  };
  return {{"two sequences", conv(10, 7, 4, 5)},
          {"more taps than rows", conv(2, 3, 4, 2)},
          {"one tap", conv(3, 2, 1, 3)},
          {"most taps", conv(9, 2, 8, 9)},
          {"packs", conv(6, 16, 4, 6)},
          {"documents", documents},
          {"one weight twice", twice},
          {"several pieces", conv(300, 70, 4, 150, false)},
          {"rows before", goes_on(10, 7, 4, 5, {})},
          {"more rows before than own", goes_on(6, 3, 4, 2, {})},
          // A document that began far before, one that did in the last row, and new ones.
          {"documents and rows before",
           goes_on(12, 5, 4, 4, {-9, -9, -9, 3, -1, -1, -1, -1, 0, 0, 2, 2})}};
}

}  // namespace

ValueId causal_conv(Builder& builder, ValueId x, ValueId w, const ConvBeginnings& beginnings,
                    const CausalConvAttributes& attributes, const std::string& name) {
  return builder.emit(kCausalConv, Attributes(attributes),
                      {x, w, beginnings.starts, beginnings.before}, name)[0];
}

const OpSpec kCausalConv{.name = "causal_conv",
                         .infer = infer_causal_conv,
                         .differentiate = differentiate_causal_conv,
                         .cost = cost_causal_conv,
                         .cpu = {.kernel = causal_conv_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(causal_conv_cuda_kernel)>,
                         .print_attributes = print_causal_conv,
                         .samples = samples_causal_conv};

const OpSpec kCausalConvGradient{.name = "causal_conv_gradient",
                                 .infer = infer_causal_conv_gradient,
                                 .cost = cost_causal_conv_gradient,
                                 .cpu = {.kernel = causal_conv_gradient_cpu_kernel},
                                 .cuda = only_kernel<TROUPE_CUDA(causal_conv_gradient_cuda_kernel)>,
                                 .print_attributes = print_causal_conv};

const OpSpec kCausalConvWeightGradient{
    .name = "causal_conv_weight_gradient",
    .infer = infer_causal_conv_weight_gradient,
    .cost = cost_causal_conv_weight_gradient,
    .cpu = {.kernel = causal_conv_weight_gradient_cpu_kernel},
    .cuda = only_kernel<TROUPE_CUDA(causal_conv_weight_gradient_cuda_kernel),
                        causal_conv_scratch_bytes>,
    .print_attributes = print_causal_conv};

}  // namespace troupe
