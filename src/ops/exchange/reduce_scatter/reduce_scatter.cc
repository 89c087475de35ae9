#include "ops/exchange/reduce_scatter/reduce_scatter.h"

#include <array>
#include <fmt/format.h>
#include <vector>

#include "comm/staging.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/emit_collective.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "program/derivative.h"

namespace troupe {

void reduce_scatter_cpu(const KernelArguments& args);
CudaKernel reduce_scatter_cuda_kernel(const OpView& op);

namespace {

void infer_reduce_scatter(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "reduce_scatter takes a tensor");
  const Value& x = context.input(0);
  const auto& attributes = context.attributes<ReduceScatterAttributes>();
  TROUPE_CHECK(
      (is_float(x.dtype) || x.dtype == DType::i32) && x.shape.rank() >= 1 && !x.rows.valid(),
      "reduce_scatter needs float or i32 rows, not ragged: " + x.name);
  TROUPE_CHECK(attributes.ranks >= 1 && x.shape[0] % attributes.ranks == 0,
               "reduce_scatter: the ranks divide the rows: " + x.name);
  std::vector<int64_t> extents;
  for (int i = 0; i < x.shape.rank(); ++i) extents.push_back(x.shape[i]);
  extents[0] /= attributes.ranks;
  context.output("", x.dtype, Shape(extents));
}

void differentiate_reduce_scatter(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto& attributes = context.attributes<ReduceScatterAttributes>();
  context.add_gradient(0, all_gather(context.builder(), context.output_gradient(0),
                                     {.group = attributes.group, .ranks = attributes.ranks},
                                     "d_" + context.input_name(0)));
}

Cost cost_reduce_scatter(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

uint64_t reduce_scatter_staging_bytes(const OpView& op, int32_t ranks) {
  const int64_t elements = op.output(0).shape.elements();
  const std::array<ShareOf, 1> rows = {[elements](int place) {
    return IndexRange{place * elements, (place + 1) * elements};
  }};
  return staged_sum_bytes(rows, op.output(0).dtype, ranks);
}

LinkTraffic links_of_reduce_scatter(const OpView& op, int32_t ranks) {
  return spread_traffic(static_cast<double>(op.input(0).bytes()), ranks);
}

RankGroup group_of_reduce_scatter(const Attributes& attributes) {
  return attributes.as<ReduceScatterAttributes>().group;
}

CpuKernel reduce_scatter_kernel(const OpView&) {
  return &reduce_scatter_cpu;
}

std::string print_reduce_scatter(const Attributes& attributes) {
  const auto& a = attributes.as<ReduceScatterAttributes>();
  return fmt::format("group={} ranks={}", name_of(a.group), a.ranks);
}

}  // namespace

ValueId reduce_scatter(Builder& builder, ValueId x, const ReduceScatterAttributes& attributes,
                       const std::string& name) {
  return emit_collective(builder, kReduceScatter, Attributes(attributes), {x}, name)[0];
}

const OpSpec kReduceScatter{
    .name = "reduce_scatter",
    .infer = infer_reduce_scatter,
    .differentiate = differentiate_reduce_scatter,
    .cost = cost_reduce_scatter,
    .cpu = {.kernel = reduce_scatter_kernel},
    .cuda =
        only_kernel<TROUPE_CUDA(reduce_scatter_cuda_kernel), nullptr, reduce_scatter_staging_bytes>,
    .group = group_of_reduce_scatter,
    .links = links_of_reduce_scatter,
    .print_attributes = print_reduce_scatter};

}  // namespace troupe
