#include "ops/elementwise/split_columns/split_columns.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

void split_columns_cpu(const KernelArguments& args);
void join_columns_cpu(const KernelArguments& args);
CudaKernel split_columns_cuda_kernel(const OpView& op);
CudaKernel join_columns_cuda_kernel(const OpView& op);

namespace {

void infer_split_columns(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "split_columns takes a matrix");
  const Value& x = context.input(0);
  const int64_t columns = context.attributes<SplitColumnsAttributes>().columns;
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid() && columns > 0 &&
                   columns < x.shape[1],
               "split_columns: " + x.name + " " + x.shape.to_string());
  const DType dtype = x.dtype;
  const Shape shape = x.shape;
  context.output("", dtype, {shape[0], columns});
  context.output("rest", dtype, {shape[0], shape[1] - columns});
}

void infer_join_columns(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "join_columns takes two matrices");
  const Value& a = context.input(0);
  const Value& b = context.input(1);
  TROUPE_CHECK(is_float(a.dtype) && a.dtype == b.dtype && a.shape.rank() == 2 &&
                   b.shape.rank() == 2 && a.shape[0] == b.shape[0] && !a.rows.valid() &&
                   !b.rows.valid(),
               "join_columns: " + a.name + " " + a.shape.to_string() + ", " + b.name + " " +
                   b.shape.to_string());
  context.output("", a.dtype, {a.shape[0], a.shape[1] + b.shape[1]});
}

void differentiate_split_columns(DerivativeContext& context) {
  if (!context.wants(0)) return;
  TROUPE_CHECK(context.output_gradient(0).valid() && context.output_gradient(1).valid(),
               "split_columns: a part without a gradient");
  context.add_gradient(0, join_columns(context.builder(), context.output_gradient(0),
                                       context.output_gradient(1), "d_" + context.input_name(0)));
}

void differentiate_join_columns(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const int64_t columns = context.builder().value(context.input(0)).shape[1];
  const SplitColumnsResult parts =
      split_columns(context.builder(), context.output_gradient(0), {.columns = columns},
                    "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, parts.first);
  if (context.wants(1)) context.add_gradient(1, parts.rest);
}

Cost cost_split_columns(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_join_columns(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

CpuKernel split_columns_kernel(const OpView&) {
  return &split_columns_cpu;
}

CpuKernel join_columns_kernel(const OpView&) {
  return &join_columns_cpu;
}

std::string print_split_columns(const Attributes& attributes) {
  return fmt::format("columns={}", attributes.as<SplitColumnsAttributes>().columns);
}

OpSample sample_split_columns(const std::string& name, const Shape& shape, int64_t columns,
                              bool differentiable = true) {
  return {name, [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", shape, {.differentiable = differentiable});
            const SplitColumnsResult parts =
                split_columns(sample.builder(), x, {.columns = columns}, "part");
            if (differentiable) {
              sample.result(parts.first);
              sample.result(parts.rest);
              return;
            }
            sample.result_without_gradient(parts.first);
            sample.result_without_gradient(parts.rest);
            const ValueId y = sample.tensor("y", {2, 5});
            const SplitColumnsResult few =
                split_columns(sample.builder(), y, {.columns = 2}, "few");
            sample.result(few.first);
            sample.result(few.rest);
          }};
}

std::vector<OpSample> samples_split_columns() {
  return {sample_split_columns("halves", {5, 8}, 4), sample_split_columns("odd", {3, 7}, 2),
          sample_split_columns("smallest", {1, 2}, 1),
          sample_split_columns("several chunks", {2000, 33}, 20, false)};
}

std::vector<OpSample> samples_join_columns() {
  return {{"odd", [](SampleBuilder& sample) {
             const ValueId a = sample.tensor("a", {3, 4});
             const ValueId b = sample.tensor("b", {3, 3});
             sample.result(join_columns(sample.builder(), a, b, "x"));
           }}};
}

}  // namespace

SplitColumnsResult split_columns(Builder& builder, ValueId x,
                                 const SplitColumnsAttributes& attributes,
                                 const std::string& name) {
  const auto outputs = builder.emit(kSplitColumns, Attributes(attributes), {x}, name);
  return {.first = outputs[0], .rest = outputs[1]};
}

ValueId join_columns(Builder& builder, ValueId first, ValueId rest, const std::string& name) {
  return builder.emit(kJoinColumns, Attributes(NoAttributes()), {first, rest}, name)[0];
}

const OpSpec kSplitColumns{.name = "split_columns",
                           .infer = infer_split_columns,
                           .differentiate = differentiate_split_columns,
                           .cost = cost_split_columns,
                           .cpu = {.kernel = split_columns_kernel},
                           .cuda = only_kernel<TROUPE_CUDA(split_columns_cuda_kernel)>,
                           .print_attributes = print_split_columns,
                           .samples = samples_split_columns};

const OpSpec kJoinColumns{.name = "join_columns",
                          .infer = infer_join_columns,
                          .differentiate = differentiate_join_columns,
                          .cost = cost_join_columns,
                          .cpu = {.kernel = join_columns_kernel},
                          .cuda = only_kernel<TROUPE_CUDA(join_columns_cuda_kernel)>,
                          .samples = samples_join_columns};

}  // namespace troupe
