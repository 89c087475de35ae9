#include "ops/exchange/exchange_heads/exchange_heads.h"

#include <fmt/format.h>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void sequence_to_heads_cpu(const KernelArguments& args);
void heads_to_sequence_cpu(const KernelArguments& args);
CudaKernel sequence_to_heads_cuda_kernel(const OpView& op);
CudaKernel heads_to_sequence_cuda_kernel(const OpView& op);

namespace {

Shape shape_by_sequence(const ExchangeHeadsAttributes& a) {
  return {int64_t{a.batch} * a.sequence / a.chunks.ranks, a.row()};
}

Shape shape_by_heads(const ExchangeHeadsAttributes& a) {
  return {int64_t{a.batch} * a.sequence, a.row() / a.chunks.ranks};
}

void check_exchange(const InferContext& context, const Shape& expected) {
  const auto& a = context.attributes<ExchangeHeadsAttributes>();
  TROUPE_CHECK(context.input_count() == 1, "an exchange of heads takes rows");
  TROUPE_CHECK(a.chunks.ranks >= 1 && a.batch >= 1 && a.heads % a.chunks.ranks == 0 &&
                   a.groups % a.chunks.ranks == 0 &&
                   a.sequence % (a.chunks.ranks == 1 ? 1 : 2 * a.chunks.ranks) == 0,
               "an exchange of heads: ranks do not divide heads and sequence");
  const Value& x = context.input(0);
  TROUPE_CHECK(is_float(x.dtype) && !x.rows.valid() && x.shape == expected,
               "an exchange of heads: " + x.name + " " + x.shape.to_string() + ", expected " +
                   expected.to_string());
}

void infer_sequence_to_heads(InferContext& context) {
  const auto& attributes = context.attributes<ExchangeHeadsAttributes>();
  check_exchange(context, shape_by_sequence(attributes));
  context.output("", context.input(0).dtype, shape_by_heads(attributes));
}

void infer_heads_to_sequence(InferContext& context) {
  const auto& attributes = context.attributes<ExchangeHeadsAttributes>();
  check_exchange(context, shape_by_heads(attributes));
  context.output("", context.input(0).dtype, shape_by_sequence(attributes));
}

void differentiate_sequence_to_heads(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(0, heads_to_sequence(context.builder(), context.output_gradient(0),
                                            context.attributes<ExchangeHeadsAttributes>(),
                                            "d_" + context.input_name(0)));
}

void differentiate_heads_to_sequence(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(0, sequence_to_heads(context.builder(), context.output_gradient(0),
                                            context.attributes<ExchangeHeadsAttributes>(),
                                            "d_" + context.input_name(0)));
}

// Packed, sent, unpacked.
Cost cost_exchange(const OpView& op) {
  return {.flops = 0, .bytes = 6 * static_cast<double>(op.input(0).bytes())};
}

// What is sent and what is received, by rank, and where that is.
uint64_t workspace_exchange(const OpView& op) {
  const auto ranks = static_cast<uint64_t>(op.attributes<ExchangeHeadsAttributes>().chunks.ranks);
  return 2 * (op.input(0).bytes() + ranks * sizeof(Block));
}

// What each rank gets, packed and received.
uint64_t exchange_heads_staging_bytes(const OpView& op, int32_t ranks) {
  return 2 * staged_section_bytes(static_cast<int64_t>(op.input(0).bytes()) / ranks, ranks);
}

LinkTraffic links_of_exchange_heads(const OpView& op, int32_t ranks) {
  return spread_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

RankGroup group_of_exchanged_heads(const Attributes& attributes) {
  return attributes.as<ExchangeHeadsAttributes>().group;
}

CpuKernel sequence_to_heads_kernel(const OpView&) {
  return &sequence_to_heads_cpu;
}

CpuKernel heads_to_sequence_kernel(const OpView&) {
  return &heads_to_sequence_cpu;
}

std::string print_exchanged_heads(const Attributes& attributes) {
  const auto& a = attributes.as<ExchangeHeadsAttributes>();
  std::string text =
      fmt::format("group={} ranks={} rank={} batch={} sequence={} heads={} groups={} head_dim={}",
                  name_of(a.group), a.chunks.ranks, a.chunks.rank, a.batch, a.sequence, a.heads,
                  a.groups, a.head_dim);
  if (a.value_dim > 0) text += fmt::format(" value_dim={}", a.value_dim);
  return text;
}

}  // namespace

ValueId sequence_to_heads(Builder& builder, ValueId x, const ExchangeHeadsAttributes& attributes,
                          const std::string& name) {
  return emit_collective(builder, kSequenceToHeads, Attributes(attributes), {x}, name)[0];
}

ValueId heads_to_sequence(Builder& builder, ValueId y, const ExchangeHeadsAttributes& attributes,
                          const std::string& name) {
  return emit_collective(builder, kHeadsToSequence, Attributes(attributes), {y}, name)[0];
}

const OpSpec kSequenceToHeads{
    .name = "sequence_to_heads",
    .infer = infer_sequence_to_heads,
    .differentiate = differentiate_sequence_to_heads,
    .cost = cost_exchange,
    .cpu = {.kernel = sequence_to_heads_kernel, .workspace = workspace_exchange},
    .cuda = only_kernel<TROUPE_CUDA(sequence_to_heads_cuda_kernel), nullptr,
                        exchange_heads_staging_bytes>,
    .group = group_of_exchanged_heads,
    .links = links_of_exchange_heads,
    .print_attributes = print_exchanged_heads};

const OpSpec kHeadsToSequence{
    .name = "heads_to_sequence",
    .infer = infer_heads_to_sequence,
    .differentiate = differentiate_heads_to_sequence,
    .cost = cost_exchange,
    .cpu = {.kernel = heads_to_sequence_kernel, .workspace = workspace_exchange},
    .cuda = only_kernel<TROUPE_CUDA(heads_to_sequence_cuda_kernel), nullptr,
                        exchange_heads_staging_bytes>,
    .group = group_of_exchanged_heads,
    .links = links_of_exchange_heads,
    .print_attributes = print_exchanged_heads};

}  // namespace troupe
