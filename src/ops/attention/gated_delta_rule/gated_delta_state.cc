#include "ops/attention/gated_delta_rule/gated_delta_state.h"

#include <vector>

#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "program/derivative.h"

namespace troupe {

CpuKernel gated_delta_state_cpu_kernel(const OpView& op);
CpuKernel gated_delta_state_gradient_cpu_kernel(const OpView& op);
CudaKernel gated_delta_state_cuda_kernel(const OpView& op);
CudaKernel gated_delta_state_gradient_cuda_kernel(const OpView& op);

namespace {

Shape ends_shape(const GatedDeltaRuleAttributes& a, int64_t rows) {
  return {rows / a.sequence, a.value_heads, a.key_dim, a.end_columns()};
}

void infer_gated_delta_state(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "gated_delta_state: takes qkv, gates and starts");
  check_delta_rule(context, 0);
  const Value qkv = context.input(0);
  context.output("", accumulation_dtype(qkv.dtype),
                 ends_shape(context.attributes<GatedDeltaRuleAttributes>(), qkv.shape[0]));
}

void infer_gated_delta_state_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "gated_delta_state_gradient: takes d_ends, qkv, gates and starts");
  check_delta_rule(context, 1);
  const Value& d_ends = context.input(0);
  const Value qkv = context.input(1);
  const Value gates = context.input(2);
  TROUPE_CHECK(
      d_ends.dtype == gates.dtype &&
          d_ends.shape == ends_shape(context.attributes<GatedDeltaRuleAttributes>(), qkv.shape[0]),
      "gated_delta_state_gradient: d_ends does not belong to " + qkv.name);
  context.output("", qkv.dtype, qkv.shape);
  context.output("d_gates", gates.dtype, gates.shape);
}

void differentiate_gated_delta_state(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kGatedDeltaStateGradient, Attributes(context.attributes<GatedDeltaRuleAttributes>()),
      {context.output_gradient(0), context.input(0), context.input(1), context.input(2)},
      "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

double end_elements(const OpView& op, int64_t rows) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<double>(rows * a.value_heads) *
         static_cast<double>(a.key_dim * a.end_columns());
}

Cost cost_gated_delta_state(const OpView& op) {
  return {.flops = kDeltaStateFlops * end_elements(op, op.input(0).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes() +
                                       op.output(0).bytes())};
}

// The states again, and four multiply-adds.
Cost cost_gated_delta_state_gradient(const OpView& op) {
  return {.flops = (kDeltaStateFlops + 8) * end_elements(op, op.input(1).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes() +
                                       2 * op.input(2).bytes())};
}

uint64_t cpu_scratch_state(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<uint64_t>(a.key_dim + a.end_columns()) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

uint64_t cpu_scratch_state_gradient(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return delta_gradient_cpu_scratch(a, a.end_columns(), op.input(1).dtype);
}

uint64_t cuda_scratch_state_gradient(const OpView& op) {
  return delta_gradient_cuda_scratch(op, 2);
}

KernelChoice choose_state(const OpView& op, const DeviceTraits& device) {
  return choose_delta_kernel(op, device, op.input(0).dtype,
                             TROUPE_CUDA(gated_delta_state_cuda_kernel), delta_cuda_scratch);
}

KernelChoice choose_state_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_delta_kernel(op, device, op.input(1).dtype,
                             TROUPE_CUDA(gated_delta_state_gradient_cuda_kernel),
                             cuda_scratch_state_gradient);
}

std::vector<OpSample> samples_gated_delta_state() {
  const auto state = [](int64_t rows, const GatedDeltaRuleAttributes& attributes,
                        const std::vector<int32_t>& starts = {}) {
    return [=](SampleBuilder& sample) {
      const ValueId qkv = sample.tensor("qkv", {rows, attributes.row_size()});
      const ValueId gates = sample_delta_gates(sample, rows, attributes.value_heads);
      const ValueId begin = starts.empty() ? ValueId{} : sample.integers("starts", {rows}, starts);
      sample.result(gated_delta_state(sample.builder(), qkv, gates, begin, attributes, "ends"));
    };
  };
  const GatedDeltaRuleAttributes plain{
      .sequence = 5, .key_heads = 2, .value_heads = 2, .key_dim = 3, .value_dim = 4};
  const GatedDeltaRuleAttributes shared{
      .sequence = 4, .key_heads = 1, .value_heads = 3, .key_dim = 4, .value_dim = 2};
  const GatedDeltaRuleAttributes smallest{
      .sequence = 1, .key_heads = 1, .value_heads = 1, .key_dim = 1, .value_dim = 1};
  // Goes on with a document before it; begins one at its first row; begins one later.
  return {{"two sequences", state(10, plain)},
          {"shared keys", state(4, shared)},
          {"smallest", state(1, smallest)},
          {"documents", state(12, shared, {-2, -2, -2, -2, 0, 0, 0, 0, -1, -1, 2, 2})}};
}

}  // namespace

ValueId gated_delta_state(Builder& builder, ValueId qkv, ValueId gates, ValueId starts,
                          const GatedDeltaRuleAttributes& attributes, const std::string& name) {
  return builder.emit(kGatedDeltaState, Attributes(attributes), {qkv, gates, starts}, name)[0];
}

const OpSpec kGatedDeltaState{
    .name = "gated_delta_state",
    .infer = infer_gated_delta_state,
    .differentiate = differentiate_gated_delta_state,
    .cost = cost_gated_delta_state,
    .cpu = {.kernel = gated_delta_state_cpu_kernel, .scratch = cpu_scratch_state},
    .cuda = choose_state,
    .print_attributes = print_delta_rule,
    .samples = samples_gated_delta_state};

const OpSpec kGatedDeltaStateGradient{
    .name = "gated_delta_state_gradient",
    .infer = infer_gated_delta_state_gradient,
    .cost = cost_gated_delta_state_gradient,
    .cpu = {.kernel = gated_delta_state_gradient_cpu_kernel, .scratch = cpu_scratch_state_gradient},
    .cuda = choose_state_gradient,
    .print_attributes = print_delta_rule};

}  // namespace troupe
