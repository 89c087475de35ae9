#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"

#include <array>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void sum_over_ranks_cpu(const KernelArguments& args);
CudaKernel sum_over_ranks_cuda_kernel(const OpView& op);

namespace {

void infer_sum_over_ranks(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "sum_over_ranks takes a tensor");
  const Value& x = context.input(0);
  TROUPE_CHECK((is_float(x.dtype) || x.dtype == DType::i32) && !x.rows.valid(),
               "sum_over_ranks needs a float or i32 tensor, not ragged: " + x.name);
  context.output("", x.dtype, x.shape);
}

void differentiate_sum_over_ranks(DerivativeContext& context) {
  if (context.wants(0)) context.add_gradient(0, context.output_gradient(0));
}

// One addition for each element and rank; a rank does its share of all ranks' additions.
Cost cost_sum_over_ranks(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

uint64_t sum_over_ranks_staging_bytes(const OpView& op, int32_t ranks) {
  const int64_t elements = op.output(0).shape.elements();
  const std::array<ShareOf, 1> shares = {
      [elements, ranks](int place) { return share_of(elements, place, ranks); }};
  return staged_sum_bytes(shares, op.output(0).dtype, ranks);
}

LinkTraffic links_of_sum_over_ranks(const OpView& op, int32_t ranks) {
  const LinkTraffic terms = spread_traffic(static_cast<double>(op.input(0).bytes()), ranks);
  return {.bytes = 2 * terms.bytes, .messages = 2 * terms.messages};
}

RankGroup group_of_sum_over_ranks(const Attributes& attributes) {
  return attributes.as<SumOverRanksAttributes>().group;
}

CpuKernel sum_over_ranks_kernel(const OpView&) {
  return &sum_over_ranks_cpu;
}

std::string print_sum_over_ranks(const Attributes& attributes) {
  return "group=" + std::string(name_of(attributes.as<SumOverRanksAttributes>().group));
}

}  // namespace

ValueId sum_over_ranks(Builder& builder, ValueId x, const SumOverRanksAttributes& attributes,
                       const std::string& name) {
  return emit_collective(builder, kSumOverRanks, Attributes(attributes), {x}, name)[0];
}

// In place: a rank reads and writes its own share of the elements, of all ranks, and each element
// is read on every rank before it is replaced on any.
const OpSpec kSumOverRanks{
    .name = "sum_over_ranks",
    .infer = infer_sum_over_ranks,
    .differentiate = differentiate_sum_over_ranks,
    .cost = cost_sum_over_ranks,
    .cpu = {.kernel = sum_over_ranks_kernel},
    .cuda =
        only_kernel<TROUPE_CUDA(sum_over_ranks_cuda_kernel), nullptr, sum_over_ranks_staging_bytes>,
    .group = group_of_sum_over_ranks,
    .links = links_of_sum_over_ranks,
    .in_place = {.output = 0, .input = 0},
    .print_attributes = print_sum_over_ranks};

}  // namespace troupe
