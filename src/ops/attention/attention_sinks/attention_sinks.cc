#include "ops/attention/attention_sinks/attention_sinks.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/cpu/row_sums.h"
#include "ops/row_sum_pieces.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel attention_sink_gradient_cpu_kernel(const OpView& op);
CudaKernel attention_sink_gradient_cuda_kernel(const OpView& op);

namespace {

enum SinkInput : uint8_t { kDOutInput, kOutInput, kLseInput, kSinksInput, kTargetInput };

void infer_attention_sink_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "attention_sink_gradient: takes d_out, out, lse, sinks and target");
  const auto& attributes = context.attributes<AttentionSinkGradientAttributes>();
  const Value& out = context.input(kOutInput);
  const int64_t rows = out.shape[0];
  TROUPE_CHECK(is_float(out.dtype) && attributes.heads >= 1 && attributes.value_dim >= 1 &&
                   out.shape == Shape({rows, int64_t{attributes.heads} * attributes.value_dim}) &&
                   context.input(kDOutInput).dtype == out.dtype &&
                   context.input(kDOutInput).shape == out.shape &&
                   context.input(kLseInput).dtype == accumulation_dtype(out.dtype) &&
                   context.input(kLseInput).shape == Shape({rows, attributes.heads}),
               "attention_sink_gradient: operands of " + out.name);
  check_attention_sinks(context, kSinksInput, attributes.heads, attributes.first_sink);
  declare_weight_gradient(context, kTargetInput, "", accumulation_dtype(out.dtype),
                          context.input(kSinksInput).shape);
}

// A product of d_out and out for each element, and a sum for each head.
Cost cost_attention_sink_gradient(const OpView& op) {
  const double passes = op.attributes<AttentionSinkGradientAttributes>().accumulate ? 2 : 1;
  return {
      .flops = 2 * static_cast<double>(op.input(kOutInput).shape.elements()) +
               3 * static_cast<double>(op.input(kLseInput).shape.elements()),
      .bytes = static_cast<double>(2 * op.input(kOutInput).bytes() + op.input(kLseInput).bytes() +
                                   op.input(kSinksInput).bytes()) +
               passes * static_cast<double>(op.output(0).bytes())};
}

uint64_t workspace_attention_sink_gradient(const OpView& op) {
  const Shape& shape = op.input(kOutInput).shape;
  return static_cast<uint64_t>(row_pieces(shape[0], shape[1]).count) *
         static_cast<uint64_t>(op.input(kSinksInput).shape[0]) *
         size_of(accumulation_dtype(op.input(kOutInput).dtype));
}

uint64_t cuda_scratch_attention_sink_gradient(const OpView& op) {
  // The pieces of the sums, and what each row of a head adds to them.
  return row_sums_bytes(op.input(kOutInput).dtype, op.input(kOutInput).shape[0],
                        op.input(kSinksInput).shape[0]) +
         op.input(kLseInput).bytes();
}

std::string print_attention_sink_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<AttentionSinkGradientAttributes>();
  return fmt::format("heads={} value_dim={} first_sink={}{}", values.heads, values.value_dim,
                     values.first_sink, values.accumulate ? " accumulate=1" : "");
}

}  // namespace

void check_attention_sinks(const InferContext& context, int input, int32_t heads,
                           int32_t first_sink) {
  TROUPE_CHECK(first_sink >= 0, "attention: the first sink");
  if (!context.has_input(input)) return;
  const Value& sinks = context.input(input);
  TROUPE_CHECK(sinks.dtype == accumulation_dtype(sinks.dtype) && sinks.shape.rank() == 1 &&
                   sinks.shape[0] >= int64_t{first_sink} + heads && !sinks.rows.valid(),
               "attention: sinks " + sinks.name + " " + sinks.shape.to_string());
}

void differentiate_attention_sinks(DerivativeContext& context, int input,
                                   const AttentionSinkGradientAttributes& attributes) {
  if (!context.input(input).valid() || !context.wants(input)) return;
  const auto target = context.weight_target(input);
  AttentionSinkGradientAttributes own = attributes;
  own.accumulate = target.accumulate;
  context.add_weight_gradient(
      input, context.builder().emit(kAttentionSinkGradient, Attributes(own),
                                    {context.output_gradient(0), context.output(0),
                                     context.output(1), context.input(input), target.target},
                                    "d_" + context.input_name(input))[0]);
}

const OpSpec kAttentionSinkGradient{
    .name = "attention_sink_gradient",
    .infer = infer_attention_sink_gradient,
    .cost = cost_attention_sink_gradient,
    .cpu = {.kernel = attention_sink_gradient_cpu_kernel,
            .workspace = workspace_attention_sink_gradient},
    .cuda = only_kernel<TROUPE_CUDA(attention_sink_gradient_cuda_kernel),
                        cuda_scratch_attention_sink_gradient>,
    .print_attributes = print_attention_sink_gradient};

}  // namespace troupe
