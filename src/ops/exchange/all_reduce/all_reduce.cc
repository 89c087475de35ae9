#include "ops/exchange/all_reduce/all_reduce.h"

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"

namespace troupe {

void all_reduce_cpu(const KernelArguments& args);
CudaKernel all_reduce_cuda_kernel(const OpView& op);

namespace {

void infer_all_reduce(InferContext& context) {
  TROUPE_CHECK(context.input_count() > 0, "all_reduce needs a tensor");
  const auto& attributes = context.attributes<AllReduceAttributes>();
  TROUPE_CHECK(attributes.first_row == 0 || attributes.shard.count == 1,
               "all_reduce: of some rows, or of a shard");
  for (int i = 0; i < context.input_count(); ++i) {
    const Value& tensor = context.input(i);
    TROUPE_CHECK(is_float(tensor.dtype) || tensor.dtype == DType::i32,
                 "all_reduce: not a number that is summed: " + tensor.name);
    TROUPE_CHECK(!tensor.rows.valid(), "all_reduce: ragged: " + tensor.name);
    TROUPE_CHECK(attributes.first_row <= tensor.shape[0], "all_reduce: fewer rows: " + tensor.name);
    context.mutates(i);
  }
}

// One addition for each element and rank; a rank does its share of all ranks' additions.
Cost cost_all_reduce(const OpView& op) {
  const double part = 1.0 / op.attributes<AllReduceAttributes>().shard.count;
  Cost cost;
  for (int i = 0; i < op.op.input_count; ++i) {
    cost.flops += part * static_cast<double>(op.input(i).shape.elements());
    cost.bytes += 2 * part * static_cast<double>(op.input(i).bytes());
  }
  return cost;
}

LinkTraffic links_of_all_reduce(const OpView& op, int32_t ranks) {
  double bytes = 0;
  for (int i = 0; i < op.op.input_count; ++i) bytes += static_cast<double>(op.input(i).bytes());
  bytes /= op.attributes<AllReduceAttributes>().shard.count;
  const LinkTraffic terms = spread_traffic(bytes, ranks);
  return {.bytes = 2 * terms.bytes, .messages = 2 * terms.messages};
}

RankGroup group_of_all_reduce(const Attributes& attributes) {
  return attributes.as<AllReduceAttributes>().group;
}

// Views of what is summed.
uint64_t all_reduce_workspace_bytes(const OpView& op) {
  const auto& attributes = op.attributes<AllReduceAttributes>();
  const bool all = attributes.first_row == 0 && attributes.shard.count == 1;
  return all ? 0 : op.op.input_count * sizeof(TensorView);
}

uint64_t all_reduce_staging_bytes(const OpView& op, int32_t ranks) {
  const auto& attributes = op.attributes<AllReduceAttributes>();
  return staged_sum_bytes(op, ranks, [&](int i) -> ShareOf {
    const Shape shape = op.output(i).shape;
    return [&, shape](int place) { return all_reduce_share(shape, attributes, place, ranks); };
  });
}

CpuKernel all_reduce_kernel(const OpView&) {
  return &all_reduce_cpu;
}

std::string print_all_reduce(const Attributes& attributes) {
  const auto& values = attributes.as<AllReduceAttributes>();
  std::string text = "group=" + std::string(name_of(values.group));
  if (values.first_row > 0) text += " first_row=" + std::to_string(values.first_row);
  if (values.shard.count > 1) {
    text +=
        " shard=" + std::to_string(values.shard.place) + "/" + std::to_string(values.shard.count);
  }
  return text;
}

}  // namespace

void all_reduce(Builder& builder, std::span<const ValueId> tensors,
                const AllReduceAttributes& attributes) {
  emit_collective(builder, kAllReduce, Attributes(attributes), tensors, "all_reduce");
}

const OpSpec kAllReduce{
    .name = "all_reduce",
    .infer = infer_all_reduce,
    .cost = cost_all_reduce,
    .cpu = {.kernel = all_reduce_kernel, .workspace = all_reduce_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(all_reduce_cuda_kernel), nullptr, all_reduce_staging_bytes>,
    .group = group_of_all_reduce,
    .links = links_of_all_reduce,
    .print_attributes = print_all_reduce};

}  // namespace troupe
