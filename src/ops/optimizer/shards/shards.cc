#include "ops/optimizer/shards/shards.h"

#include <algorithm>
#include <string>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"

namespace troupe {

void reduce_shards_cpu(const KernelArguments& args);
void gather_shards_cpu(const KernelArguments& args);
CudaKernel reduce_shards_cuda_kernel(const OpView& op);
CudaKernel gather_shards_cuda_kernel(const OpView& op);

namespace {

void infer_shards(InferContext& context) {
  TROUPE_CHECK(context.input_count() > 0, "a collective of shards needs a tensor");
  TROUPE_CHECK(context.attributes<ShardsAttributes>().owner_count <= context.input_count(),
               "shards: owners of tensors that are not there");
  for (int i = 0; i < context.input_count(); ++i) {
    TROUPE_CHECK(!context.input(i).rows.valid(), "shards: ragged: " + context.input(i).name);
    context.mutates(i);
  }
}

void infer_reduce_shards(InferContext& context) {
  for (int i = 0; i < context.input_count(); ++i) {
    const DType dtype = context.input(i).dtype;
    TROUPE_CHECK(is_float(dtype) || dtype == DType::i32,
                 "reduce_shards: not a number that is summed: " + context.input(i).name);
  }
  infer_shards(context);
}

double bytes_of(const OpView& op) {
  double bytes = 0;
  for (int i = 0; i < op.op.input_count; ++i) bytes += static_cast<double>(op.input(i).bytes());
  return bytes;
}

// A rank adds up the ranks' terms of its shard: as many as a tensor has elements.
Cost cost_reduce_shards(const OpView& op) {
  Cost cost;
  for (int i = 0; i < op.op.input_count; ++i) {
    cost.flops += static_cast<double>(op.input(i).shape.elements());
  }
  cost.bytes = bytes_of(op);
  return cost;
}

Cost cost_gather_shards(const OpView& op) {
  return {.flops = 0, .bytes = 2 * bytes_of(op)};
}

LinkTraffic links_of_shards(const OpView& op, int32_t ranks) {
  return spread_traffic(bytes_of(op), ranks);
}

RankGroup group_of_shards(const Attributes& attributes) {
  return attributes.as<ShardsAttributes>().group;
}

uint64_t reduce_shards_staging_bytes(const OpView& op, int32_t ranks) {
  const auto& attributes = op.attributes<ShardsAttributes>();
  return staged_sum_bytes(op, ranks, [&](int i) -> ShareOf {
    const Shape shape = op.output(i).shape;
    const int32_t owner = owner_of(attributes.owners(), static_cast<size_t>(i));
    return [=](int place) {
      return shard_of(shape, {.place = place, .count = ranks, .owner = owner});
    };
  });
}

CpuKernel reduce_shards_kernel(const OpView&) {
  return &reduce_shards_cpu;
}

CpuKernel gather_shards_kernel(const OpView&) {
  return &gather_shards_cpu;
}

std::string print_shards(const Attributes& attributes) {
  const auto& shards = attributes.as<ShardsAttributes>();
  std::string text = "group=" + std::string(name_of(shards.group));
  for (const int16_t owner : shards.owners()) {
    text += (&owner == shards.owner.data() ? " owners=" : ",") + std::to_string(owner);
  }
  return text;
}

void emit_shards(Builder& builder, const OpSpec& spec, const ShardedTensors& tensors,
                 RankGroup group) {
  const auto emit = [&](std::span<const ValueId> together, const ShardsAttributes& attributes) {
    emit_collective(builder, spec, Attributes(attributes), together, spec.name);
  };
  if (!tensors.cut.empty()) emit(tensors.cut, {.group = group});
  ShardsAttributes attributes{.group = group};
  std::span<const ValueId> owned = tensors.owned;
  std::span<const int16_t> owners = tensors.owners;
  while (!owned.empty()) {
    const size_t count = std::min(owned.size(), attributes.owner.size());
    std::copy_n(owners.begin(), count, attributes.owner.begin());
    attributes.owner_count = static_cast<int16_t>(count);
    emit(owned.first(count), attributes);
    owned = owned.subspan(count);
    owners = owners.subspan(count);
  }
}

}  // namespace

void ShardedTensors::add(ValueId tensor, int32_t owner) {
  if (owner < 0) {
    cut.push_back(tensor);
    return;
  }
  owned.push_back(tensor);
  owners.push_back(static_cast<int16_t>(owner));
}

void reduce_shards(Builder& builder, const ShardedTensors& tensors, RankGroup group) {
  emit_shards(builder, kReduceShards, tensors, group);
}

void gather_shards(Builder& builder, const ShardedTensors& tensors, RankGroup group) {
  emit_shards(builder, kGatherShards, tensors, group);
}

const OpSpec kReduceShards{
    .name = "reduce_shards",
    .infer = infer_reduce_shards,
    .cost = cost_reduce_shards,
    .cpu = {.kernel = reduce_shards_kernel},
    .cuda =
        only_kernel<TROUPE_CUDA(reduce_shards_cuda_kernel), nullptr, reduce_shards_staging_bytes>,
    .group = group_of_shards,
    .links = links_of_shards,
    .print_attributes = print_shards};

const OpSpec kGatherShards{.name = "gather_shards",
                           .infer = infer_shards,
                           .cost = cost_gather_shards,
                           .cpu = {.kernel = gather_shards_kernel},
                           .cuda = only_kernel<TROUPE_CUDA(gather_shards_cuda_kernel)>,
                           .group = group_of_shards,
                           .links = links_of_shards,
                           .print_attributes = print_shards};

}  // namespace troupe
