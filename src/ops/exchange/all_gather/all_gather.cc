#include "ops/exchange/all_gather/all_gather.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "program/derivative.h"

namespace troupe {

void all_gather_cpu(const KernelArguments& args);
CudaKernel all_gather_cuda_kernel(const OpView& op);

namespace {

void infer_all_gather(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "all_gather takes a tensor");
  const Value& x = context.input(0);
  const auto& attributes = context.attributes<AllGatherAttributes>();
  TROUPE_CHECK(attributes.ranks >= 1 && x.shape.rank() >= 1 && !x.rows.valid(),
               "all_gather needs rows, not ragged: " + x.name);
  std::vector<int64_t> extents;
  for (int i = 0; i < x.shape.rank(); ++i) extents.push_back(x.shape[i]);
  extents[0] *= attributes.ranks;
  context.output("", x.dtype, Shape(extents));
}

void differentiate_all_gather(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto& attributes = context.attributes<AllGatherAttributes>();
  context.add_gradient(0, reduce_scatter(context.builder(), context.output_gradient(0),
                                         {.group = attributes.group, .ranks = attributes.ranks},
                                         "d_" + context.input_name(0)));
}

Cost cost_all_gather(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

LinkTraffic links_of_all_gather(const OpView& op, int32_t ranks) {
  return copied_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

RankGroup group_of_all_gather(const Attributes& attributes) {
  return attributes.as<AllGatherAttributes>().group;
}

CpuKernel all_gather_kernel(const OpView&) {
  return &all_gather_cpu;
}

std::string print_all_gather(const Attributes& attributes) {
  const auto& a = attributes.as<AllGatherAttributes>();
  return fmt::format("group={} ranks={}", name_of(a.group), a.ranks);
}

}  // namespace

ValueId all_gather(Builder& builder, ValueId x, const AllGatherAttributes& attributes,
                   const std::string& name) {
  return emit_collective(builder, kAllGather, Attributes(attributes), {x}, name)[0];
}

const OpSpec kAllGather{.name = "all_gather",
                        .infer = infer_all_gather,
                        .differentiate = differentiate_all_gather,
                        .cost = cost_all_gather,
                        .cpu = {.kernel = all_gather_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(all_gather_cuda_kernel)>,
                        .group = group_of_all_gather,
                        .links = links_of_all_gather,
                        .print_attributes = print_all_gather};

}  // namespace troupe
