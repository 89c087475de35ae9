#include "ops/exchange/clone_experts/clone_experts.h"

#include <fmt/format.h>
#include <vector>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "program/derivative.h"

namespace troupe {

void clone_experts_cpu(const KernelArguments& args);
CpuKernel return_clones_cpu_kernel(const OpView& op);
CudaKernel clone_experts_cuda_kernel(const OpView& op);
CudaKernel return_clones_cuda_kernel(const OpView& op);

namespace {

// Of inputs 0 and 1: as many experts as these.
void check_clones(const InferContext& context, const std::string& kind, int64_t experts_here) {
  const Value& tensor = context.input(0);
  const Value& experts = context.input(1);
  TROUPE_CHECK(is_float(tensor.dtype) && tensor.shape.rank() >= 2 && !tensor.rows.valid() &&
                   tensor.shape[0] == experts_here,
               kind + ": not of " + std::to_string(experts_here) + " experts: " + tensor.name);
  const int64_t ranks = context.attributes<CloneExpertsAttributes>().ranks;
  TROUPE_CHECK(experts.dtype == DType::i32 && experts.shape.rank() == 1 && ranks >= 1 &&
                   experts.shape[0] >= ranks && experts.shape[0] % ranks == 0,
               kind + " needs i32 experts, as many on each rank: " + experts.name);
}

Shape with_experts(const Shape& shape, int64_t experts) {
  std::vector<int64_t> extents = {experts};
  for (int i = 1; i < shape.rank(); ++i) extents.push_back(shape[i]);
  return Shape(extents);
}

void infer_clone_experts(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "clone_experts takes a weight, experts");
  const auto& a = context.attributes<CloneExpertsAttributes>();
  check_clones(context, "clone_experts", a.own);
  const Value weight = context.input(0);
  context.output("", weight.dtype, with_experts(weight.shape, context.input(1).shape[0] / a.ranks));
}

void infer_return_clones(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "return_clones takes a gradient, experts, a target");
  const auto& a = context.attributes<CloneExpertsAttributes>();
  const Value& gradient = context.input(0);
  check_clones(context, "return_clones", context.input(1).shape[0] / a.ranks);
  TROUPE_CHECK(gradient.dtype == accumulation_dtype(gradient.dtype),
               "return_clones: not a gradient: " + gradient.name);
  // A gradient in f32 may be that of a bf16 weight.
  const bool narrow = context.has_input(2) && context.input(2).dtype == DType::bf16;
  declare_weight_gradient(context, 2, "", narrow ? DType::bf16 : gradient.dtype,
                          with_experts(gradient.shape, a.own));
}

void differentiate_clone_experts(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto target = context.weight_target(0);
  auto attributes = context.attributes<CloneExpertsAttributes>();
  attributes.accumulate = target.accumulate;
  context.add_weight_gradient(
      0, emit_collective(context.builder(), kReturnClones, Attributes(attributes),
                         {context.output_gradient(0), context.input(1), target.target},
                         "d_" + context.input_name(0))[0]);
}

int64_t clones_of_rank(const OpView& op) {
  return op.input(1).shape[0] / op.attributes<CloneExpertsAttributes>().ranks;
}

double bytes_of_expert(const Value& tensor) {
  return static_cast<double>(tensor.bytes()) / static_cast<double>(tensor.shape[0]);
}

Cost cost_clone_experts(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

// As many sums as a rank has copies. Without a main gradient that holds others, zeros besides.
Cost cost_return_clones(const OpView& op) {
  const bool accumulate = op.attributes<CloneExpertsAttributes>().accumulate;
  const auto clones = static_cast<double>(clones_of_rank(op));
  return {.flops = clones * static_cast<double>(op.input(0).shape.row_elements()),
          .bytes = static_cast<double>(op.input(0).bytes()) +
                   (accumulate ? 2 * clones * bytes_of_expert(op.output(0))
                               : static_cast<double>(op.output(0).bytes()))};
}

// A rank has as many copies of others' experts as others have of its own, on average. At most all
// copies are of one rank's experts.
LinkTraffic links_of_clones(const OpView& op, int32_t ranks) {
  const double bytes = static_cast<double>(clones_of_rank(op)) * bytes_of_expert(op.input(0));
  return {.bytes = bytes,
          .messages = static_cast<double>(clones_of_rank(op)),
          .most_bytes = bytes * (ranks - 1)};
}

// As many experts as a rank may have copies of, for each rank and from each.
uint64_t clones_staging_bytes(const OpView& op, int32_t ranks) {
  const auto expert_bytes =
      op.input(0).shape.row_elements() * static_cast<int64_t>(size_of(op.input(0).dtype));
  return 2 * staged_section_bytes(clones_of_rank(op) * expert_bytes, ranks);
}

RankGroup group_of_clones(const Attributes& attributes) {
  return attributes.as<CloneExpertsAttributes>().group;
}

CpuKernel clone_experts_kernel(const OpView&) {
  return &clone_experts_cpu;
}

// The sum of an expert's gradients, and one that came.
uint64_t workspace_return_clones(const OpView& op) {
  return 2 * static_cast<uint64_t>(op.input(0).shape.row_elements()) * size_of(op.input(0).dtype);
}

std::string print_clone_experts(const Attributes& attributes) {
  const auto& a = attributes.as<CloneExpertsAttributes>();
  return fmt::format("group={} ranks={} own={}{}", name_of(a.group), a.ranks, a.own,
                     a.accumulate ? " accumulate=1" : "");
}

}  // namespace

ValueId clone_experts(Builder& builder, ValueId weight, ValueId experts,
                      CloneExpertsAttributes attributes, const std::string& name) {
  attributes.own = static_cast<int32_t>(builder.value(weight).shape[0]);
  return emit_collective(builder, kCloneExperts, Attributes(attributes), {weight, experts},
                         name)[0];
}

const OpSpec kCloneExperts{
    .name = "clone_experts",
    .infer = infer_clone_experts,
    .differentiate = differentiate_clone_experts,
    .cost = cost_clone_experts,
    .cpu = {.kernel = clone_experts_kernel},
    .cuda = only_kernel<TROUPE_CUDA(clone_experts_cuda_kernel), nullptr, clones_staging_bytes>,
    .group = group_of_clones,
    .is_run_again = true,
    .links = links_of_clones,
    .print_attributes = print_clone_experts};

const OpSpec kReturnClones{
    .name = "return_clones",
    .infer = infer_return_clones,
    .cost = cost_return_clones,
    .cpu = {.kernel = return_clones_cpu_kernel, .workspace = workspace_return_clones},
    .cuda = only_kernel<TROUPE_CUDA(return_clones_cuda_kernel), nullptr, clones_staging_bytes>,
    .group = group_of_clones,
    .links = links_of_clones,
    .print_attributes = print_clone_experts};

}  // namespace troupe
