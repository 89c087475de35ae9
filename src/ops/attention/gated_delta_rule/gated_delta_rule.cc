#include "ops/attention/gated_delta_rule/gated_delta_rule.h"

#include <vector>

#include "ops/attention/gated_delta_rule/cuda/delta_sm90.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel gated_delta_rule_cpu_kernel(const OpView& op);
CpuKernel gated_delta_rule_gradient_cpu_kernel(const OpView& op);
CudaKernel gated_delta_rule_cuda_kernel(const OpView& op);
CudaKernel gated_delta_rule_gradient_cuda_kernel(const OpView& op);

KernelChoice choose_delta_kernel(const OpView& op, const DeviceTraits& device, DType dtype,
                                 SelectCudaKernel select, ScratchRule scratch) {
  const bool is_fast = has_delta_sm90(dtype, op.attributes<GatedDeltaRuleAttributes>());
  KernelChoice choice = make_choice(op, device, is_fast ? "chunks" : "heads", select, scratch);
  if (!is_fast) choice.slow = dtype == DType::bf16 ? SlowKernel::head_size : SlowKernel::dtype;
  return choice;
}

uint64_t delta_cuda_scratch(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  if (!has_delta_sm90(op.input(0).dtype, a)) return 0;
  return static_cast<uint64_t>(delta_sm90_scratch(op.input(0).shape[0], a));
}

uint64_t delta_gradient_cuda_scratch(const OpView& op, int parts) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  const DType dtype = op.input(1).dtype;
  const int64_t rows = op.input(1).shape[0];
  if (has_delta_sm90(dtype, a)) {
    return static_cast<uint64_t>(delta_sm90_gradient_scratch(rows, a, parts));
  }
  // Of all sequences and heads the states; of each row the gradients of normed keys and queries or,
  // in two parts, of keys and gates.
  const int64_t columns = parts == 1 ? a.value_dim : a.end_columns();
  const int64_t of_row = parts == 1 ? 2 * int64_t{a.key_dim} : 2 * (int64_t{a.key_dim} + 2);
  const int64_t elements =
      rows / a.sequence * a.value_heads * delta_states(a.sequence) * a.key_dim * columns +
      rows * a.value_heads * of_row;
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

namespace {

// Of qkv and a state before each of its sequences.
void check_initial(const InferContext& context, int qkv, int initial) {
  if (!context.has_input(initial)) return;
  const auto& a = context.attributes<GatedDeltaRuleAttributes>();
  const Value& value = context.input(initial);
  const int64_t sequences = context.input(qkv).shape[0] / a.sequence;
  TROUPE_CHECK(value.dtype == accumulation_dtype(context.input(qkv).dtype) &&
                   value.shape == Shape({sequences, a.value_heads, a.key_dim, a.value_dim}),
               "gated_delta_rule: " + value.name + " " + value.shape.to_string());
}

void infer_gated_delta_rule(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "gated_delta_rule: takes qkv, gates, starts and initial");
  check_delta_rule(context, 0);
  check_initial(context, 0, 3);
  const Value qkv = context.input(0);
  context.output("", qkv.dtype,
                 {qkv.shape[0], context.attributes<GatedDeltaRuleAttributes>().value_size()});
}

void infer_gated_delta_rule_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "gated_delta_rule_gradient: takes d_o, qkv, gates, starts and initial");
  check_delta_rule(context, 1);
  check_initial(context, 1, 4);
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
  if (!context.has_input(4)) return;
  const Value initial = context.input(4);
  context.output("d_initial", initial.dtype, initial.shape);
}

void differentiate_gated_delta_rule(DerivativeContext& context) {
  const bool wants_initial = context.wants(3);
  if (!context.wants(0) && !context.wants(1) && !wants_initial) return;
  const auto gradients = context.builder().emit(
      kGatedDeltaRuleGradient, Attributes(context.attributes<GatedDeltaRuleAttributes>()),
      {context.output_gradient(0), context.input(0), context.input(1), context.input(2),
       context.input(3)},
      "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
  if (wants_initial) context.add_gradient(3, gradients[2]);
}

// Of each element of a state also a multiply-add with the query.
constexpr double kFlopsOfElement = kDeltaStateFlops + 2;

double state_elements(const OpView& op, int64_t rows) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<double>(rows * a.value_heads) * static_cast<double>(a.state_size());
}

double initial_bytes(const OpView& op, int initial) {
  return op.has_input(initial) ? static_cast<double>(op.input(initial).bytes()) : 0;
}

Cost cost_gated_delta_rule(const OpView& op) {
  return {.flops = kFlopsOfElement * state_elements(op, op.input(0).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes() +
                                       op.output(0).bytes()) +
                   initial_bytes(op, 3)};
}

// The states again, and six multiply-adds.
Cost cost_gated_delta_rule_gradient(const OpView& op) {
  return {.flops = (kFlopsOfElement + 12) * state_elements(op, op.input(1).shape[0]),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes() +
                                       2 * op.input(2).bytes()) +
                   2 * initial_bytes(op, 4)};
}

uint64_t cpu_scratch_forward(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return static_cast<uint64_t>(a.state_size() + 2 * a.key_dim + a.value_dim) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

uint64_t cpu_scratch_gradient(const OpView& op) {
  const auto& a = op.attributes<GatedDeltaRuleAttributes>();
  return delta_gradient_cpu_scratch(a, a.value_dim, op.input(1).dtype);
}

uint64_t cuda_scratch_gradient(const OpView& op) {
  return delta_gradient_cuda_scratch(op, 1);
}

KernelChoice choose_forward(const OpView& op, const DeviceTraits& device) {
  return choose_delta_kernel(op, device, op.input(0).dtype,
                             TROUPE_CUDA(gated_delta_rule_cuda_kernel), delta_cuda_scratch);
}

KernelChoice choose_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_delta_kernel(op, device, op.input(1).dtype,
                             TROUPE_CUDA(gated_delta_rule_gradient_cuda_kernel),
                             cuda_scratch_gradient);
}

std::vector<OpSample> samples_gated_delta_rule() {
  const auto rule = [](int64_t rows, const GatedDeltaRuleAttributes& attributes,
                       const std::vector<int32_t>& starts = {}, bool has_initial = false) {
    return [=](SampleBuilder& sample) {
      const ValueId qkv = sample.tensor("qkv", {rows, attributes.row_size()});
      const ValueId gates = sample_delta_gates(sample, rows, attributes.value_heads);
      DeltaBeginnings beginnings;
      if (!starts.empty()) beginnings.starts = sample.integers("starts", {rows}, starts);
      if (has_initial) {
        beginnings.initial = sample.tensor("initial",
                                           {rows / attributes.sequence, attributes.value_heads,
                                            attributes.key_dim, attributes.value_dim},
                                           {.accumulation = true});
      }
      sample.result(gated_delta_rule(sample.builder(), qkv, gates, beginnings, attributes, "o"));
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
          {"documents", rule(12, shared, {0, 0, 2, 2, 2, 5, 0, 1, 1, 1, 4, 4})},
          {"a state before", rule(10, plain, {}, true)},
          // The first sequence goes on with the document before it, the second begins its own.
          {"documents and a state before",
           rule(12, shared, {-3, -3, -3, 3, 3, 5, 0, 0, 0, 0, 4, 4}, true)}};
}

}  // namespace

ValueId gated_delta_rule(Builder& builder, ValueId qkv, ValueId gates,
                         const DeltaBeginnings& beginnings,
                         const GatedDeltaRuleAttributes& attributes, const std::string& name) {
  return builder.emit(kGatedDeltaRule, Attributes(attributes),
                      {qkv, gates, beginnings.starts, beginnings.initial}, name)[0];
}

const OpSpec kGatedDeltaRule{
    .name = "gated_delta_rule",
    .infer = infer_gated_delta_rule,
    .differentiate = differentiate_gated_delta_rule,
    .cost = cost_gated_delta_rule,
    .cpu = {.kernel = gated_delta_rule_cpu_kernel, .scratch = cpu_scratch_forward},
    .cuda = choose_forward,
    .print_attributes = print_delta_rule,
    .samples = samples_gated_delta_rule};

const OpSpec kGatedDeltaRuleGradient{
    .name = "gated_delta_rule_gradient",
    .infer = infer_gated_delta_rule_gradient,
    .cost = cost_gated_delta_rule_gradient,
    .cpu = {.kernel = gated_delta_rule_gradient_cpu_kernel, .scratch = cpu_scratch_gradient},
    .cuda = choose_gradient,
    .print_attributes = print_delta_rule};

}  // namespace troupe
