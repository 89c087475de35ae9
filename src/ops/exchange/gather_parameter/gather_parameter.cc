#include "ops/exchange/gather_parameter/gather_parameter.h"

#include <array>
#include <fmt/format.h>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void gather_parameter_cpu(const KernelArguments& args);
CpuKernel sum_parameter_gradient_cpu_kernel(const OpView& op);
CudaKernel gather_parameter_cuda_kernel(const OpView& op);
CudaKernel sum_parameter_gradient_cuda_kernel(const OpView& op);

namespace {

void infer_gather_parameter(InferContext& context) {
  const Value& shard = context.input(0);
  const auto& attributes = context.attributes<GatherParameterAttributes>();
  TROUPE_CHECK(
      !shard.rows.valid() &&
          shard.shape.elements() == shape_of_shard(attributes.shape, attributes.shard).elements(),
      "gather_parameter: not the shard of " + attributes.shape.to_string() + ": " + shard.name +
          " " + shard.shape.to_string());
  context.output("", shard.dtype, attributes.shape);
}

void infer_sum_parameter_gradient(InferContext& context) {
  const Value& gradient = context.input(0);
  const auto& attributes = context.attributes<GatherParameterAttributes>();
  TROUPE_CHECK(gradient.dtype == accumulation_dtype(gradient.dtype) &&
                   gradient.shape == attributes.shape && !gradient.rows.valid(),
               "sum_parameter_gradient: not a gradient of " + attributes.shape.to_string() + ": " +
                   gradient.name);
  // A gradient in f32 may be that of a bf16 weight.
  const bool narrow = context.has_input(1) && context.input(1).dtype == DType::bf16;
  declare_weight_gradient(context, 1, "", narrow ? DType::bf16 : gradient.dtype,
                          shape_of_shard(attributes.shape, attributes.shard));
}

void differentiate_gather_parameter(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto target = context.weight_target(0);
  auto attributes = context.attributes<GatherParameterAttributes>();
  attributes.accumulate = target.accumulate;
  context.add_weight_gradient(
      0, emit_collective(context.builder(), kSumParameterGradient, Attributes(attributes),
                         {context.output_gradient(0), target.target},
                         "d_" + context.input_name(0))[0]);
}

Cost cost_gather_parameter(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

// The rank adds up the ranks' terms of its shard: as many as the whole tensor has elements.
Cost cost_sum_parameter_gradient(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

uint64_t sum_parameter_gradient_staging_bytes(const OpView& op, int32_t ranks) {
  const Shape whole = op.attributes<GatherParameterAttributes>().shape;
  const std::array<ShareOf, 1> shards = {
      [whole, ranks](int place) { return shard_of(whole, {.place = place, .count = ranks}); }};
  return staged_sum_bytes(shards, op.input(0).dtype, ranks);
}

LinkTraffic links_of_gather_parameter(const OpView& op, int32_t ranks) {
  return spread_traffic(static_cast<double>(op.output(0).bytes()), ranks);
}

LinkTraffic links_of_sum_parameter_gradient(const OpView& op, int32_t ranks) {
  return spread_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

RankGroup group_of_gather_parameter(const Attributes& attributes) {
  return attributes.as<GatherParameterAttributes>().group;
}

CpuKernel gather_parameter_kernel(const OpView&) {
  return &gather_parameter_cpu;
}

// The ranks' sums take the place of what they are made of, which is not this operation's to change.
uint64_t workspace_sum_parameter_gradient(const OpView& op) {
  return op.input(0).bytes();
}

std::string print_gather_parameter(const Attributes& attributes) {
  const auto& a = attributes.as<GatherParameterAttributes>();
  return fmt::format("group={} shard={}/{}{}", name_of(a.group), a.shard.place, a.shard.count,
                     a.accumulate ? " accumulate=1" : "");
}

}  // namespace

ValueId gather_parameter(Builder& builder, ValueId shard,
                         const GatherParameterAttributes& attributes, const std::string& name) {
  return emit_collective(builder, kGatherParameter, Attributes(attributes), {shard}, name)[0];
}

const OpSpec kGatherParameter{.name = "gather_parameter",
                              .infer = infer_gather_parameter,
                              .differentiate = differentiate_gather_parameter,
                              .cost = cost_gather_parameter,
                              .cpu = {.kernel = gather_parameter_kernel},
                              .cuda = only_kernel<TROUPE_CUDA(gather_parameter_cuda_kernel)>,
                              .group = group_of_gather_parameter,
                              .gathers_shards = true,
                              .links = links_of_gather_parameter,
                              .print_attributes = print_gather_parameter};

const OpSpec kSumParameterGradient{
    .name = "sum_parameter_gradient",
    .infer = infer_sum_parameter_gradient,
    .cost = cost_sum_parameter_gradient,
    .cpu = {.kernel = sum_parameter_gradient_cpu_kernel,
            .workspace = workspace_sum_parameter_gradient},
    .cuda = only_kernel<TROUPE_CUDA(sum_parameter_gradient_cuda_kernel), nullptr,
                        sum_parameter_gradient_staging_bytes>,
    .group = group_of_gather_parameter,
    .links = links_of_sum_parameter_gradient,
    .print_attributes = print_gather_parameter};

}  // namespace troupe
