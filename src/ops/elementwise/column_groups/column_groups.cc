#include "ops/elementwise/column_groups/column_groups.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel split_column_groups_cpu_kernel(const OpView& op);
CpuKernel join_column_groups_cpu_kernel(const OpView& op);
CudaKernel split_column_groups_cuda_kernel(const OpView& op);
CudaKernel join_column_groups_cuda_kernel(const OpView& op);

namespace {

void check_column_groups(const ColumnGroupsAttributes& a) {
  TROUPE_CHECK(a.groups > 0 && a.first > 0 && a.first < 4 && a.tail >= 0 &&
                   a.widths[static_cast<size_t>(a.first)] > 0,
               "column groups: sizes");
  for (const int32_t width : a.widths) TROUPE_CHECK(width >= 0, "column groups: sizes");
}

void infer_split_column_groups(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "split_column_groups: takes x");
  const auto& attributes = context.attributes<ColumnGroupsAttributes>();
  check_column_groups(attributes);
  const Value x = context.input(0);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] == attributes.columns() &&
                   !x.rows.valid(),
               "split_column_groups: " + x.name + " " + x.shape.to_string());
  context.output("", x.dtype, {x.shape[0], attributes.first_columns()});
  context.output("second", x.dtype, {x.shape[0], attributes.second_columns()});
}

void infer_join_column_groups(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "join_column_groups: takes two matrices");
  const auto& attributes = context.attributes<ColumnGroupsAttributes>();
  check_column_groups(attributes);
  const Value a = context.input(0);
  const Value& b = context.input(1);
  const int64_t rows = a.shape.rank() == 2 ? a.shape[0] : -1;
  TROUPE_CHECK(is_float(a.dtype) && b.dtype == a.dtype && !a.rows.valid() && !b.rows.valid() &&
                   a.shape == Shape({rows, attributes.first_columns()}) &&
                   b.shape == Shape({rows, attributes.second_columns()}),
               "join_column_groups: " + a.name + " " + a.shape.to_string() + " and " + b.name +
                   " " + b.shape.to_string());
  context.output("", a.dtype, {rows, attributes.columns()});
}

void differentiate_split_column_groups(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, context.builder().emit(kJoinColumnGroups,
                                Attributes(context.attributes<ColumnGroupsAttributes>()),
                                {context.output_gradient(0), context.output_gradient(1)},
                                "d_" + context.input_name(0))[0]);
}

Cost cost_split_column_groups(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_join_column_groups(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

std::string print_column_groups(const Attributes& attributes) {
  const auto& a = attributes.as<ColumnGroupsAttributes>();
  return fmt::format("groups={} widths={},{},{},{} first={} tail={}", a.groups, a.widths[0],
                     a.widths[1], a.widths[2], a.widths[3], a.first, a.tail);
}

// All parts of a row begin and end at packs.
template <SelectCudaKernel kSelect>
KernelChoice choose_column_groups(const OpView& op, const DeviceTraits& device) {
  const auto& a = op.attributes<ColumnGroupsAttributes>();
  const DType dtype = op.input(0).dtype;
  bool packs = is_made_of_packs(a.tail, dtype);
  for (const int32_t width : a.widths) packs = packs && is_made_of_packs(width, dtype);
  return make_choice(op, device, packs ? "packs" : "elements", kSelect);
}

std::vector<OpSample> samples_column_groups() {
  const auto split = [](int64_t rows, const ColumnGroupsAttributes& attributes) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, attributes.columns()});
      const auto [first, second] = split_column_groups(sample.builder(), x, attributes, "y");
      sample.result(first);
      sample.result(second);
    };
  };
  const ColumnGroupsAttributes gated{.groups = 3, .widths = {5, 5}, .first = 1, .tail = 4};
  const ColumnGroupsAttributes delta{.groups = 2, .widths = {3, 3, 4, 4}, .first = 3};
  const ColumnGroupsAttributes packs{.groups = 2, .widths = {16, 32, 16}, .first = 2, .tail = 48};
  const ColumnGroupsAttributes late{.groups = 2, .widths = {2, 1, 3}, .first = 1, .tail = 5};
  const ColumnGroupsAttributes smallest{.groups = 1, .widths = {1, 1}, .first = 1};
  const auto join = [=](SampleBuilder& sample) {
    const ValueId a = sample.tensor("a", {3, late.first_columns()});
    const ValueId b = sample.tensor("b", {3, late.second_columns()});
    sample.result_without_gradient(
        sample.builder().emit(kJoinColumnGroups, Attributes(late), {a, b}, "x")[0]);
  };
  return {{"queries and gates, then keys", split(4, gated)},
          {"four sections", split(3, delta)},
          {"packs", split(5, packs)},
          {"several sections in the second", split(2, late)},
          {"smallest", split(1, smallest)},
          {"join", join}};
}

}  // namespace

ColumnGroupsResult split_column_groups(Builder& builder, ValueId x,
                                       const ColumnGroupsAttributes& attributes,
                                       const std::string& name) {
  const auto outputs = builder.emit(kSplitColumnGroups, Attributes(attributes), {x}, name);
  return {.first = outputs[0], .second = outputs[1]};
}

const OpSpec kSplitColumnGroups{
    .name = "split_column_groups",
    .infer = infer_split_column_groups,
    .differentiate = differentiate_split_column_groups,
    .cost = cost_split_column_groups,
    .cpu = {.kernel = split_column_groups_cpu_kernel},
    .cuda = choose_column_groups<TROUPE_CUDA(split_column_groups_cuda_kernel)>,
    .print_attributes = print_column_groups,
    .samples = samples_column_groups};

const OpSpec kJoinColumnGroups{
    .name = "join_column_groups",
    .infer = infer_join_column_groups,
    .cost = cost_join_column_groups,
    .cpu = {.kernel = join_column_groups_cpu_kernel},
    .cuda = choose_column_groups<TROUPE_CUDA(join_column_groups_cuda_kernel)>,
    .print_attributes = print_column_groups};

}  // namespace troupe
