#include "ops/exchange/exchange_rows/exchange_rows.h"

#include <algorithm>
#include <fmt/format.h>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void exchange_counts_cpu(const KernelArguments& args);
void send_rows_cpu(const KernelArguments& args);
CpuKernel return_rows_cpu_kernel(DType dtype);
CudaKernel exchange_counts_cuda_kernel(const OpView& op);
CudaKernel send_rows_cuda_kernel(const OpView& op);
CudaKernel return_rows_cuda_kernel(const OpView& op);

namespace {

// The rows of a tensor that receives those of `tokens` tokens of each rank.
int64_t received_rows(const ExchangeRowsAttributes& attributes, int64_t ranks, int64_t tokens) {
  return attributes.most_received == 0 ? ranks * tokens : attributes.most_received;
}

// slots, counts and offsets, as inputs 1 to 3. Returns the number of ranks.
int64_t check_exchange(const InferContext& context, const std::string& kind) {
  TROUPE_CHECK(context.input_count() == 4, kind + " takes rows, slots, counts, offsets");
  const Value& slots = context.input(1);
  const Value& counts = context.input(2);
  const Value& offsets = context.input(3);
  TROUPE_CHECK(slots.dtype == DType::i32 && slots.shape.rank() == 2,
               kind + " needs i32 slots [T, n]: " + slots.name);
  const int64_t ranks = slots.shape[1];
  TROUPE_CHECK(counts.dtype == DType::i32 && counts.shape == Shape({ranks}),
               kind + " needs i32 counts [n]: " + counts.name);
  TROUPE_CHECK(offsets.dtype == DType::i32 && offsets.shape == Shape({ranks + 1}),
               kind + " needs i32 offsets [n + 1]: " + offsets.name);
  const auto& attributes = context.attributes<ExchangeRowsAttributes>();
  TROUPE_CHECK(attributes.copies >= 1 && attributes.copies <= ranks,
               kind + ": copies of a token, at most one for each rank");
  return ranks;
}

void infer_exchange_counts(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "exchange_counts takes the counts");
  const Value& counts = context.input(0);
  TROUPE_CHECK(counts.dtype == DType::i32 && counts.shape.rank() == 1,
               "exchange_counts needs i32 counts [n]: " + counts.name);
  const int64_t ranks = counts.shape[0];
  context.output("", DType::i32, {ranks + 1});
}

void infer_send_rows(InferContext& context) {
  const int64_t ranks = check_exchange(context, "send_rows");
  const Value& x = context.input(0);
  TROUPE_CHECK(x.shape.rank() == 2 && x.shape[0] == context.input(1).shape[0],
               "send_rows needs a row for each token: " + x.name);
  const DType dtype = x.dtype;
  const auto& attributes = context.attributes<ExchangeRowsAttributes>();
  const int64_t rows = received_rows(attributes, ranks, x.shape[0]);
  const int64_t expected = std::min(attributes.expected_received, rows);
  context.output("", dtype, {rows, x.shape[1]},
                 RowCount{context.input_id(3), static_cast<int32_t>(ranks), expected});
}

void infer_return_rows(InferContext& context) {
  const int64_t ranks = check_exchange(context, "return_rows");
  const Value& y = context.input(0);
  const auto& attributes = context.attributes<ExchangeRowsAttributes>();
  TROUPE_CHECK(is_float(y.dtype) && y.shape.rank() == 2 &&
                   y.shape[0] == received_rows(attributes, ranks, context.input(1).shape[0]),
               "return_rows needs as many rows as can have been sent: " + y.name);
  const DType dtype = y.dtype;
  const Shape shape = {context.input(1).shape[0], y.shape[1]};
  context.output("", dtype, shape);
}

void differentiate_exchange(DerivativeContext& context, const OpSpec& other) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, emit_collective(
             context.builder(), other, Attributes(context.attributes<ExchangeRowsAttributes>()),
             {context.output_gradient(0), context.input(1), context.input(2), context.input(3)},
             "d_" + context.input_name(0))[0]);
}

void differentiate_send_rows(DerivativeContext& context) {
  differentiate_exchange(context, kReturnRows);
}

void differentiate_return_rows(DerivativeContext& context) {
  differentiate_exchange(context, kSendRows);
}

Cost cost_exchange_counts(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(2 * op.input(0).bytes())};
}

// As many rows as are received.
double sent_bytes(const OpView& op, const Value& rows_of_tokens) {
  const auto& attributes = op.attributes<ExchangeRowsAttributes>();
  const int64_t rows = attributes.expected_received > 0
                           ? attributes.expected_received
                           : attributes.copies * rows_of_tokens.shape[0];
  return static_cast<double>(rows * rows_of_tokens.shape[1]) *
         static_cast<double>(size_of(rows_of_tokens.dtype));
}

// Rows are packed, sent, and stored.
Cost cost_send_rows(const OpView& op) {
  return {.flops = 0, .bytes = 4 * sent_bytes(op, op.input(0))};
}

Cost cost_return_rows(const OpView& op) {
  const double sent = sent_bytes(op, op.output(0));
  return {.flops = sent / static_cast<double>(size_of(op.output(0).dtype)), .bytes = 3 * sent};
}

// The counts of all ranks; and rows for each rank, packed and received.
uint64_t exchange_counts_staging_bytes(const OpView& op, int32_t ranks) {
  return staged_section_bytes(static_cast<int64_t>(op.input(0).bytes()), ranks);
}
uint64_t send_rows_staging_bytes(const OpView& op, int32_t ranks) {
  return 2 * staged_section_bytes(static_cast<int64_t>(op.input(0).bytes()), ranks);
}
uint64_t return_rows_staging_bytes(const OpView& op, int32_t ranks) {
  return 2 * staged_section_bytes(static_cast<int64_t>(op.output(0).bytes()), ranks);
}

LinkTraffic links_of_exchange_counts(const OpView& op, int32_t ranks) {
  return spread_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

LinkTraffic links_of_rows(const OpView& op, const Value& rows_of_tokens, int32_t ranks) {
  const int64_t most =
      received_rows(op.attributes<ExchangeRowsAttributes>(), ranks, rows_of_tokens.shape[0]);
  return routed_traffic(sent_bytes(op, rows_of_tokens),
                        static_cast<double>(most * rows_of_tokens.shape[1]) *
                            static_cast<double>(size_of(rows_of_tokens.dtype)),
                        ranks);
}

LinkTraffic links_of_send_rows(const OpView& op, int32_t ranks) {
  return links_of_rows(op, op.input(0), ranks);
}

LinkTraffic links_of_return_rows(const OpView& op, int32_t ranks) {
  return links_of_rows(op, op.output(0), ranks);
}

RankGroup group_of_exchanged_rows(const Attributes& attributes) {
  return attributes.as<ExchangeRowsAttributes>().group;
}

CpuKernel exchange_counts_kernel(const OpView&) {
  return &exchange_counts_cpu;
}
CpuKernel send_rows_kernel(const OpView&) {
  return &send_rows_cpu;
}
CpuKernel return_rows_kernel(const OpView& op) {
  return return_rows_cpu_kernel(op.output(0).dtype);
}

// The blocks sent and received, and a count for each rank.
uint64_t exchange_counts_workspace_bytes(const OpView& op) {
  return static_cast<uint64_t>(op.input(0).shape[0]) * (2 * sizeof(Block) + sizeof(int32_t));
}

// The blocks sent and received, and the packed rows.
uint64_t packed_bytes(const OpView& op, const Value& rows_of_tokens) {
  return static_cast<uint64_t>(op.attributes<ExchangeRowsAttributes>().copies) *
             rows_of_tokens.bytes() +
         static_cast<uint64_t>(op.input(2).shape[0]) * 2 * sizeof(Block);
}

uint64_t send_rows_workspace_bytes(const OpView& op) {
  return packed_bytes(op, op.input(0));
}
uint64_t return_rows_workspace_bytes(const OpView& op) {
  return packed_bytes(op, op.output(0));
}

std::string print_exchanged_rows(const Attributes& attributes) {
  const auto& a = attributes.as<ExchangeRowsAttributes>();
  std::string text = fmt::format("group={} copies={}", name_of(a.group), a.copies);
  if (a.expected_received != 0) text += fmt::format(" expected_received={}", a.expected_received);
  if (a.most_received != 0) text += fmt::format(" most_received={}", a.most_received);
  return text;
}

}  // namespace

RowExchange exchange_counts(Builder& builder, const DispatchPlan& plan,
                            const ExchangeRowsAttributes& attributes, const std::string& name) {
  const ValueId offsets =
      emit_collective(builder, kExchangeCounts, Attributes(attributes), {plan.counts}, name)[0];
  return {.plan = plan, .offsets = offsets, .attributes = attributes};
}

ValueId send_rows(Builder& builder, ValueId x, const RowExchange& exchange,
                  const std::string& name) {
  return emit_collective(builder, kSendRows, Attributes(exchange.attributes),
                         {x, exchange.plan.slots, exchange.plan.counts, exchange.offsets}, name)[0];
}

ValueId return_rows(Builder& builder, ValueId y, const RowExchange& exchange,
                    const std::string& name) {
  return emit_collective(builder, kReturnRows, Attributes(exchange.attributes),
                         {y, exchange.plan.slots, exchange.plan.counts, exchange.offsets}, name)[0];
}

const OpSpec kExchangeCounts{
    .name = "exchange_counts",
    .infer = infer_exchange_counts,
    .cost = cost_exchange_counts,
    .cpu = {.kernel = exchange_counts_kernel, .workspace = exchange_counts_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(exchange_counts_cuda_kernel), nullptr,
                        exchange_counts_staging_bytes>,
    .group = group_of_exchanged_rows,
    .links = links_of_exchange_counts,
    .print_attributes = print_exchanged_rows};

const OpSpec kSendRows{
    .name = "send_rows",
    .infer = infer_send_rows,
    .differentiate = differentiate_send_rows,
    .cost = cost_send_rows,
    .cpu = {.kernel = send_rows_kernel, .workspace = send_rows_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(send_rows_cuda_kernel), nullptr, send_rows_staging_bytes>,
    .group = group_of_exchanged_rows,
    .links = links_of_send_rows,
    .print_attributes = print_exchanged_rows};

const OpSpec kReturnRows{
    .name = "return_rows",
    .infer = infer_return_rows,
    .differentiate = differentiate_return_rows,
    .cost = cost_return_rows,
    .cpu = {.kernel = return_rows_kernel, .workspace = return_rows_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(return_rows_cuda_kernel), nullptr, return_rows_staging_bytes>,
    .group = group_of_exchanged_rows,
    .links = links_of_return_rows,
    .print_attributes = print_exchanged_rows};

}  // namespace troupe
