#include "ops/exchange/prefix_sum/prefix_sum.h"

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"

namespace troupe {

void prefix_sum_cpu(const KernelArguments& args);
CudaKernel prefix_sum_cuda_kernel(const OpView& op);

namespace {

void infer_prefix_sum(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "prefix_sum takes counts, previous");
  const Value counts = context.input(0);
  TROUPE_CHECK(counts.dtype == DType::i32 && !counts.rows.valid(),
               "prefix_sum needs i32 counts, not ragged: " + counts.name);
  if (context.has_input(1)) {
    const Value& previous = context.input(1);
    TROUPE_CHECK(previous.dtype == DType::i32 && previous.shape == counts.shape,
                 "prefix_sum: previous is like counts: " + previous.name);
  }
  context.output("", DType::i32, counts.shape);
  context.output("total", DType::i32, counts.shape);
}

// Each rank reads the counts of all; how many these are is not known here.
Cost cost_prefix_sum(const OpView& op) {
  return {.flops = 2 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 3 * static_cast<double>(op.input(0).bytes())};
}

// The counts of all ranks.
uint64_t prefix_sum_staging_bytes(const OpView& op, int32_t ranks) {
  return staged_section_bytes(static_cast<int64_t>(op.input(0).bytes()), ranks);
}

LinkTraffic links_of_prefix_sum(const OpView& op, int32_t ranks) {
  return copied_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

RankGroup group_of_prefix_sum(const Attributes& attributes) {
  return attributes.as<PrefixSumAttributes>().group;
}

CpuKernel prefix_sum_kernel(const OpView&) {
  return &prefix_sum_cpu;
}

std::string print_prefix_sum(const Attributes& attributes) {
  return "group=" + std::string(name_of(attributes.as<PrefixSumAttributes>().group));
}

}  // namespace

PrefixSumResult prefix_sum(Builder& builder, ValueId counts, ValueId previous,
                           const PrefixSumAttributes& attributes, const std::string& name) {
  const auto outputs =
      emit_collective(builder, kPrefixSum, Attributes(attributes), {counts, previous}, name);
  return {.running = outputs[0], .total = outputs[1]};
}

const OpSpec kPrefixSum{
    .name = "prefix_sum",
    .infer = infer_prefix_sum,
    .cost = cost_prefix_sum,
    .cpu = {.kernel = prefix_sum_kernel},
    .cuda = only_kernel<TROUPE_CUDA(prefix_sum_cuda_kernel), nullptr, prefix_sum_staging_bytes>,
    .group = group_of_prefix_sum,
    .links = links_of_prefix_sum,
    .print_attributes = print_prefix_sum};

}  // namespace troupe
