#include "ops/attention/gated_delta_rule/gated_delta_rule.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/gated_delta_rule/cuda/delta_sm90.h"
#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel gated_delta_rule_cpu_kernel(const OpView& op);
CpuKernel gated_delta_rule_gradient_cpu_kernel(const OpView& op);
CudaKernel gated_delta_rule_cuda_kernel(const OpView& op);
CudaKernel gated_delta_rule_gradient_cuda_kernel(const OpView& op);

namespace {

// Inputs qkv, gates and starts from `first` on.
void check_delta_rule(const InferContext& context, int first) {
  const auto& a = context.attributes<GatedDeltaRuleAttributes>();
  const Value& qkv = context.input(first);
  TROUPE_CHECK(a.sequence > 0 && a.key_heads > 0 && a.key_dim > 0 && a.value_dim > 0 &&
                   a.value_heads >= a.key_heads && a.value_heads % a.key_heads == 0,
               "gated_delta_rule: sizes");
  TROUPE_CHECK(is_float(qkv.dtype) && qkv.shape.rank() == 2 && qkv.shape[1] == a.row_size() &&
                   qkv.shape[0] % a.sequence == 0 && !qkv.rows.valid(),
               "gated_delta_rule: " + qkv.name + " " + qkv.shape.to_string());
  const int64_t rows = qkv.shape[0];
  const Value& gates = context.input(first + 1);
  TROUPE_CHECK(gates.dtype == accumulation_dtype(qkv.dtype) &&
                   gates.shape == Shape({rows, 2 * int64_t{a.value_heads}}),
               "gated_delta_rule: " + gates.name + " " + gates.shape.to_string());
  if (!context.has_input(first + 2)) return;
  const Value& starts = context.input(first + 2);
  TROUPE_CHECK(starts.dtype == DType::i32 && starts.shape == Shape({rows}),
               "gated_delta_rule: starts is not i32 [T]: " + starts.name);
}

void infer_gated_delta_rule(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "gated_delta_rule: takes qkv, gates and starts");
  check_delta_rule(context, 0);
  const Value qkv = context.input(0);
  context.output("", qkv.dtype,
                 {qkv.shape[0], context.attributes<GatedDeltaRuleAttributes>().value_size()});
}

void infer_gated_delta_rule_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "gated_delta_rule_gradient: takes d_o, qkv, gates and starts");
  check_delta_rule(context, 1);
  const Value& d_o = context.input(0);
  const Value qkv = context.input(1);
  const Value gates = context.input(2);
  TROUPE_CHECK(
      d_o.dtype == qkv.dtype &&
          d_o.shape ==
              Shape({qkv.shape[0], context.attributes<GatedDeltaRuleAttributes>().value_size()}),
      "gated_delta_rule_gradient: d_o does not belong to " + qkv.name);
  context.output("", qkv.dtype, qkv.shape);
  context.output("d_gates", gates.dtype, gates.shape);
}

void differentiate_gated_delta_rule(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kGatedDeltaRuleGradient, Attributes(context.attributes<GatedDeltaRuleAttributes>()),
      {context.output_gradient(0), context.input(0), context.input(1), context.input(2)},
      "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

// Of each element of a state: its decay, and three multiply-adds, one for each line above.
constexpr double kFlopsOfElement = 7;

double state_elements(const OpView& op, int64_t rows) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<double>(rows * a.value_heads) * static_cast<double>(a.state_size());
}

Cost cost_gated_delta_rule(const OpView& op) {
  return {.flops = kFlopsOfElement * state_elements(op, op.input(0).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes() +
                                       op.output(0).bytes())};
}

// The states again, and six multiply-adds.
Cost cost_gated_delta_rule_gradient(const OpView& op) {
  return {.flops = (kFlopsOfElement + 12) * state_elements(op, op.input(1).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes() +
                                       2 * op.input(2).bytes())};
}

uint64_t cpu_scratch_forward(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<uint64_t>(a.state_size() + 2 * a.key_dim + a.value_dim) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

// The states, the gradient of one; of each row normed query and key, their factors and gradients.
uint64_t cpu_scratch_gradient(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  const int64_t elements = (delta_states(a.sequence) + 1) * a.state_size() +
                           int64_t{a.sequence} * (4 * a.key_dim + 2) + 2 * a.value_dim;
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(op.input(1).dtype));
}

// Of the fast kernels as they say; else none.
uint64_t cuda_scratch_forward(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  if (!has_delta_sm90(op.input(0).dtype, a)) return 0;
  return static_cast<uint64_t>(delta_sm90_scratch(op.input(0).shape[0], a));
}

// The same; else of all sequences and heads the states, and of each row the
// gradients of its queries and keys.
uint64_t cuda_scratch_gradient(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  const int64_t rows = op.input(1).shape[0];
  if (has_delta_sm90(op.input(1).dtype, a)) {
    return static_cast<uint64_t>(delta_sm90_gradient_scratch(rows, a));
  }
  const int64_t elements =
      rows / a.sequence * a.value_heads * delta_states(a.sequence) * a.state_size() +
      2 * rows * a.value_heads * a.key_dim;
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(op.input(1).dtype));
}

// Whole heads row by row in ordinary arithmetic, or chunks of rows on tensor cores (delta_sm90.h).
KernelChoice choose_delta_rule(const OpView& op, const DeviceTraits& device, DType dtype,
                               SelectCudaKernel select, ScratchRule scratch) {
  const bool is_fast = has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>());
  KernelChoice choice = make_choice(op, device, is_fast ? "chunks" : "heads", select, scratch);
  if (!is_fast) choice.slow = dtype == DType::bf16 ? SlowKernel::head_size : SlowKernel::dtype;
  return choice;
}

KernelChoice choose_forward(const OpView& op, const DeviceTraits& device) {
  return choose_delta_rule(op, device, op.input(0).dtype, TROUPE_CUDA(gated_delta_rule_cuda_kernel),
                           cuda_scratch_forward);
}

KernelChoice choose_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_delta_rule(op, device, op.input(1).dtype,
                           TROUPE_CUDA(gated_delta_rule_gradient_cuda_kernel),
                           cuda_scratch_gradient);
}

std::string print_gated_delta_rule(const Attributes& attributes) {
  const auto& a = attributes.as<GatedDeltaRuleAttributes>();
  return fmt::format("sequence={} key_heads={} value_heads={} key_dim={} value_dim={}", a.sequence,
                     a.key_heads, a.value_heads, a.key_dim, a.value_dim);
}

std::vector<OpSample> samples_gated_delta_rule() {
  const auto gates_of = [](SampleBuilder& sample, int64_t rows, int64_t heads) {
    std::vector<double> gates;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < 2 * heads; ++i) {
        const auto step = static_cast<double>((row * 7 + i * 5) % 11) / 11;
        gates.push_back(i < heads ? 0.1 + 0.8 * step : -1.5 * step);
      }
    }
    return sample.values("gates", {rows, 2 * heads}, gates, {.accumulation = true});
  };
  const auto rule = [=](int64_t rows, const GatedDeltaRuleAttributes& attributes,
                        const std::vector<int32_t>& starts = {}) {
    return [=](SampleBuilder& sample) {
      const ValueId qkv = sample.tensor("qkv", {rows, attributes.row_size()});
      const ValueId gates = gates_of(sample, rows, attributes.value_heads);
      const ValueId begin = starts.empty() ? ValueId{} : sample.integers("starts", {rows}, starts);
      sample.result(gated_delta_rule(sample.builder(), qkv, gates, begin, attributes, "o"));
    };
  };
  const GatedDeltaRuleAttributes plain{
      .sequence = 5, .key_heads = 2, .value_heads = 2, .key_dim = 3, .value_dim = 4};
  const GatedDeltaRuleAttributes shared{
      .sequence = 6, .key_heads = 1, .value_heads = 3, .key_dim = 4, .value_dim = 2};
  const GatedDeltaRuleAttributes smallest{
      .sequence = 1, .key_heads = 1, .value_heads = 1, .key_dim = 1, .value_dim = 1};
  return {{"two sequences", rule(10, plain)},
          {"shared keys", rule(6, shared)},
          {"smallest", rule(1, smallest)},
          {"documents", rule(12, shared, {0, 0, 2, 2, 2, 5, 0, 1, 1, 1, 4, 4})}};
}

}  // namespace

ValueId gated_delta_rule(Builder& builder, ValueId qkv, ValueId gates, ValueId starts,
                         const GatedDeltaRuleAttributes& attributes, const std::string& name) {
  return builder.emit(kGatedDeltaRule, Attributes(attributes), {qkv, gates, starts}, name)[0];
}

const OpSpec kGatedDeltaRule{
    .name = "gated_delta_rule",
    .infer = infer_gated_delta_rule,
    .differentiate = differentiate_gated_delta_rule,
    .cost = cost_gated_delta_rule,
    .cpu = {.kernel = gated_delta_rule_cpu_kernel, .scratch = cpu_scratch_forward},
    .cuda = choose_forward,
    .print_attributes = print_gated_delta_rule,
    .samples = samples_gated_delta_rule};

const OpSpec kGatedDeltaRuleGradient{
    .name = "gated_delta_rule_gradient",
    .infer = infer_gated_delta_rule_gradient,
    .cost = cost_gated_delta_rule_gradient,
    .cpu = {.kernel = gated_delta_rule_gradient_cpu_kernel, .scratch = cpu_scratch_gradient},
    .cuda = choose_gradient,
    .print_attributes = print_gated_delta_rule};

}  // namespace troupe
