#include "ops/exchange/push_rows/push_rows.h"

#include <fmt/format.h>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void push_rows_cpu(const KernelArguments& args);
void push_rows_back_cpu(const KernelArguments& args);
CudaKernel push_rows_cuda_kernel(const OpView& op);
CudaKernel push_rows_back_cuda_kernel(const OpView& op);

namespace {

// Inputs before the tensors: slots and counts, and for the way back received.
constexpr int kPlanInputs = 2;
constexpr int kPlanInputsBack = 3;

// Returns the number of ranks.
int64_t check_push(const InferContext& context, const std::string& kind, int plan_inputs) {
  TROUPE_CHECK(context.input_count() > plan_inputs, kind + " needs a tensor");
  const Value& slots = context.input(0);
  TROUPE_CHECK(slots.dtype == DType::i32 && slots.shape.rank() == 2,
               kind + " needs i32 slots [T, n]: " + slots.name);
  for (int i = 1; i < plan_inputs; ++i) {
    const Value& counts = context.input(i);
    TROUPE_CHECK(counts.dtype == DType::i32 && counts.shape == Shape({slots.shape[1]}),
                 kind + " needs i32 counts [n]: " + counts.name);
  }
  return slots.shape[1];
}

void infer_push_rows(InferContext& context) {
  const int64_t ranks = check_push(context, "push_rows", kPlanInputs);
  context.output("received", DType::i32, {ranks});
  for (int i = kPlanInputs; i < context.input_count(); ++i) {
    const Value& x = context.input(i);
    TROUPE_CHECK(x.shape.rank() == 2 && x.shape[0] == context.input(0).shape[0] && !x.rows.valid(),
                 "push_rows needs a row for each token: " + x.name);
    context.output(x.name, x.dtype, {ranks * x.shape[0], x.shape[1]});
  }
}

void infer_push_rows_back(InferContext& context) {
  const int64_t ranks = check_push(context, "push_rows_back", kPlanInputsBack);
  const int64_t tokens = context.input(0).shape[0];
  for (int i = kPlanInputsBack; i < context.input_count(); ++i) {
    const Value& y = context.input(i);
    TROUPE_CHECK(is_float(y.dtype) && y.shape.rank() == 2 && y.shape[0] == ranks * tokens,
                 "push_rows_back needs as many rows as can have been pushed: " + y.name);
    context.output(i == kPlanInputsBack ? "" : y.name, y.dtype, {tokens, y.shape[1]});
  }
}

// All gradients that arrived go back together.
void differentiate_push_rows(DerivativeContext& context) {
  std::vector<ValueId> inputs = {context.input(0), context.input(1), context.output(0)};
  std::vector<int> tensors;
  for (int i = kPlanInputs; i < context.op().op.input_count; ++i) {
    const ValueId gradient = context.output_gradient(i - kPlanInputs + 1);
    if (!context.wants(i) || !gradient.valid()) continue;
    inputs.push_back(gradient);
    tensors.push_back(i);
  }
  if (tensors.empty()) return;
  const auto gradients = emit_collective(context.builder(), kPushRowsBack,
                                         Attributes(context.attributes<PushRowsAttributes>()),
                                         inputs, "d_" + context.input_name(tensors.front()));
  for (size_t j = 0; j < tensors.size(); ++j) context.add_gradient(tensors[j], gradients[j]);
}

void differentiate_push_rows_back(DerivativeContext& context) {
  std::vector<ValueId> inputs = {context.input(0), context.input(1)};
  std::vector<int> tensors;
  for (int i = kPlanInputsBack; i < context.op().op.input_count; ++i) {
    const ValueId gradient = context.output_gradient(i - kPlanInputsBack);
    if (!context.wants(i) || !gradient.valid()) continue;
    inputs.push_back(gradient);
    tensors.push_back(i);
  }
  if (tensors.empty()) return;
  const auto outputs = emit_collective(context.builder(), kPushRows,
                                       Attributes(context.attributes<PushRowsAttributes>()), inputs,
                                       "d_" + context.input_name(tensors.front()));
  for (size_t j = 0; j < tensors.size(); ++j) context.add_gradient(tensors[j], outputs[j + 1]);
}

// Of a tensor with room for a row of each token of each rank: those that are expected.
double expected_share(const OpView& op, const Value& rows_of_ranks) {
  const int64_t expected = op.attributes<PushRowsAttributes>().expected_received;
  const int64_t most = rows_of_ranks.shape[0];
  return expected == 0 ? 1 : static_cast<double>(expected) / static_cast<double>(most);
}

double expected_bytes(const OpView& op, const Value& rows_of_ranks) {
  return static_cast<double>(rows_of_ranks.bytes()) * expected_share(op, rows_of_ranks);
}

Cost cost_push_rows(const OpView& op) {
  Cost cost;
  for (int i = 1; i < op.op.output_count; ++i) cost.bytes += 2 * expected_bytes(op, op.output(i));
  return cost;
}

Cost cost_push_rows_back(const OpView& op) {
  Cost cost;
  for (int i = kPlanInputsBack; i < op.op.input_count; ++i) {
    const Value& rows = op.input(i);
    cost.flops += static_cast<double>(rows.shape.elements()) * expected_share(op, rows);
    cost.bytes += 3 * expected_bytes(op, rows);
  }
  return cost;
}

// Rows for each rank, of one tensor after the other: packed for them, and coming back from them.
uint64_t push_rows_staging_bytes(const OpView& op, int32_t ranks) {
  uint64_t most = 0;
  for (int i = kPlanInputs; i < op.op.input_count; ++i) {
    most = std::max(most, staged_section_bytes(static_cast<int64_t>(op.input(i).bytes()), ranks));
  }
  return most;
}
uint64_t push_rows_back_staging_bytes(const OpView& op, int32_t ranks) {
  uint64_t most = 0;
  for (int i = 0; i < op.op.output_count; ++i) {
    most = std::max(most, staged_section_bytes(static_cast<int64_t>(op.output(i).bytes()), ranks));
  }
  return most;
}

LinkTraffic links_of_push_rows(const OpView& op, int32_t ranks) {
  auto bytes = static_cast<double>(op.output(0).bytes());
  double most = bytes;
  for (int i = 1; i < op.op.output_count; ++i) {
    bytes += expected_bytes(op, op.output(i));
    most += static_cast<double>(op.output(i).bytes());
  }
  return routed_traffic(bytes, most, ranks);
}

LinkTraffic links_of_push_rows_back(const OpView& op, int32_t ranks) {
  double bytes = 0;
  double most = 0;
  for (int i = kPlanInputsBack; i < op.op.input_count; ++i) {
    bytes += expected_bytes(op, op.input(i));
    most += static_cast<double>(op.input(i).bytes());
  }
  return routed_traffic(bytes, most, ranks);
}

RankGroup group_of_push(const Attributes& attributes) {
  return attributes.as<PushRowsAttributes>().group;
}

CpuKernel push_rows_kernel(const OpView&) {
  return &push_rows_cpu;
}
CpuKernel push_rows_back_kernel(const OpView&) {
  return &push_rows_back_cpu;
}

// The windows that others write into.
uint64_t push_rows_workspace_bytes(const OpView& op) {
  return op.op.output_count * sizeof(Block);
}

// The windows, and their memory: room for the rows of every rank.
uint64_t push_rows_back_workspace_bytes(const OpView& op) {
  uint64_t bytes = op.op.output_count * sizeof(Block);
  for (int i = kPlanInputsBack; i < op.op.input_count; ++i) bytes += op.input(i).bytes();
  return bytes;
}

std::string print_push(const Attributes& attributes) {
  const auto& a = attributes.as<PushRowsAttributes>();
  std::string text = fmt::format("group={}", name_of(a.group));
  if (a.expected_received != 0) text += fmt::format(" expected_received={}", a.expected_received);
  return text;
}

}  // namespace

PushedRows push_rows(Builder& builder, std::span<const ValueId> tensors, const DispatchPlan& plan,
                     const PushRowsAttributes& attributes, const std::string& name) {
  std::vector<ValueId> inputs = {plan.slots, plan.counts};
  inputs.insert(inputs.end(), tensors.begin(), tensors.end());
  const auto outputs = emit_collective(builder, kPushRows, Attributes(attributes), inputs, name);
  return {.received = outputs[0], .rows = {outputs.begin() + 1, outputs.end()}};
}

ValueId push_rows_back(Builder& builder, ValueId rows, const DispatchPlan& plan, ValueId received,
                       const PushRowsAttributes& attributes, const std::string& name) {
  const std::vector<ValueId> inputs = {plan.slots, plan.counts, received, rows};
  return emit_collective(builder, kPushRowsBack, Attributes(attributes), inputs, name)[0];
}

const OpSpec kPushRows{
    .name = "push_rows",
    .infer = infer_push_rows,
    .differentiate = differentiate_push_rows,
    .cost = cost_push_rows,
    .cpu = {.kernel = push_rows_kernel, .workspace = push_rows_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(push_rows_cuda_kernel), nullptr, push_rows_staging_bytes>,
    .group = group_of_push,
    .links = links_of_push_rows,
    .print_attributes = print_push};

const OpSpec kPushRowsBack{
    .name = "push_rows_back",
    .infer = infer_push_rows_back,
    .differentiate = differentiate_push_rows_back,
    .cost = cost_push_rows_back,
    .cpu = {.kernel = push_rows_back_kernel, .workspace = push_rows_back_workspace_bytes},
    .cuda =
        only_kernel<TROUPE_CUDA(push_rows_back_cuda_kernel), nullptr, push_rows_back_staging_bytes>,
    .group = group_of_push,
    .links = links_of_push_rows_back,
    .print_attributes = print_push};

}  // namespace troupe
