#include "ops/elementwise/split_rows/split_rows.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

void split_rows_cpu(const KernelArguments& args);
void join_rows_cpu(const KernelArguments& args);
CudaKernel split_rows_cuda_kernel(const OpView& op);
CudaKernel join_rows_cuda_kernel(const OpView& op);

namespace {

Shape with_rows(const Shape& shape, int64_t rows) {
  std::vector<int64_t> extents = {rows};
  for (int i = 1; i < shape.rank(); ++i) extents.push_back(shape[i]);
  return Shape(extents);
}

void infer_split_rows(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "split_rows takes a tensor");
  const Value x = context.input(0);
  const int64_t rows = context.attributes<SplitRowsAttributes>().rows;
  TROUPE_CHECK(x.shape.rank() >= 1 && x.shape[0] >= 1 && !x.rows.valid() && rows >= 1,
               "split_rows: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK((x.shape[0] - 1) / rows < std::numeric_limits<uint16_t>::max(),
               "split_rows: an operation has no more results: " + x.shape.to_string());
  for (int64_t begin = 0; begin < x.shape[0]; begin += rows) {
    context.output(std::to_string(begin / rows), x.dtype,
                   with_rows(x.shape, std::min(rows, x.shape[0] - begin)));
  }
}

void infer_join_rows(InferContext& context) {
  TROUPE_CHECK(context.input_count() >= 1, "join_rows takes tensors");
  const Value first = context.input(0);
  const int last = context.input_count() - 1;
  int64_t rows = 0;
  for (int i = 0; i <= last; ++i) {
    const Value& piece = context.input(i);
    TROUPE_CHECK(piece.dtype == first.dtype && piece.shape.rank() >= 1 && !piece.rows.valid() &&
                     piece.shape == with_rows(first.shape, piece.shape[0]) &&
                     (i == last ? piece.shape[0] <= first.shape[0] : piece.shape == first.shape),
                 "join_rows: " + piece.name + " " + piece.shape.to_string() + " after " +
                     first.name + " " + first.shape.to_string());
    rows += piece.shape[0];
  }
  context.output("", first.dtype, with_rows(first.shape, rows));
}

void differentiate_split_rows(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const OpView op = context.op();
  std::vector<ValueId> gradients;
  for (int i = 0; i < op.op.output_count; ++i) {
    gradients.push_back(context.output_gradient(i));
    TROUPE_CHECK(gradients.back().valid(), "split_rows: a piece without a gradient");
  }
  context.add_gradient(0, join_rows(context.builder(), gradients, "d_" + context.input_name(0)));
}

void differentiate_join_rows(DerivativeContext& context) {
  const OpView op = context.op();
  const int count = op.op.input_count;
  const SplitRowsAttributes attributes{.rows = op.input(0).shape[0]};
  const std::vector<ValueId> pieces = split_rows(context.builder(), context.output_gradient(0),
                                                 attributes, "d_" + context.input_name(0));
  for (int i = 0; i < count; ++i) {
    if (context.wants(i)) context.add_gradient(i, pieces[static_cast<size_t>(i)]);
  }
}

Cost cost_split_rows(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_join_rows(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

CpuKernel split_rows_kernel(const OpView&) {
  return &split_rows_cpu;
}

CpuKernel join_rows_kernel(const OpView&) {
  return &join_rows_cpu;
}

std::string print_split_rows(const Attributes& attributes) {
  return fmt::format("rows={}", attributes.as<SplitRowsAttributes>().rows);
}

std::vector<OpSample> samples_split_rows() {
  const auto split = [](SampleBuilder& sample, const Shape& shape, int64_t rows) {
    const ValueId x = sample.tensor("x", shape);
    for (const ValueId piece : split_rows(sample.builder(), x, {.rows = rows}, "piece")) {
      sample.result(piece);
    }
  };
  const auto plain = [=](const Shape& shape, int64_t rows) {
    return [=](SampleBuilder& sample) { split(sample, shape, rows); };
  };
  // Beside something that has a gradient.
  const auto integers = [=](SampleBuilder& sample) {
    const ValueId ids = sample.integers("ids", {5}, {7, 3, 0, -1, 9});
    for (const ValueId piece : split_rows(sample.builder(), ids, {.rows = 2}, "ids_piece")) {
      sample.result_without_gradient(piece);
    }
    split(sample, {3, 2}, 2);
  };
  const auto several_chunks = [=](SampleBuilder& sample) {
    const ValueId many = sample.tensor("many", {3000, 33}, {.differentiable = false});
    for (const ValueId piece : split_rows(sample.builder(), many, {.rows = 1300}, "many_piece")) {
      sample.result_without_gradient(piece);
    }
    split(sample, {3, 2}, 2);
  };
  return {{"halves", plain({6, 4}, 3)}, {"rest", plain({7, 3}, 3)},
          {"vector", plain({5}, 2)},    {"one_piece", plain({3, 2, 2}, 4)},
          {"integers", integers},       {"several_chunks", several_chunks}};
}

std::vector<OpSample> samples_join_rows() {
  const auto join = [](const std::vector<int64_t>& rows) {
    return [=](SampleBuilder& sample) {
      std::vector<ValueId> pieces;
      for (size_t i = 0; i < rows.size(); ++i) {
        pieces.push_back(sample.tensor("piece " + std::to_string(i), {rows[i], 3}));
      }
      sample.result(join_rows(sample.builder(), pieces, "x"));
    };
  };
  return {{"halves", join({2, 2})}, {"rest", join({3, 3, 1})}, {"one_piece", join({4})}};
}

}  // namespace

std::vector<ValueId> split_rows(Builder& builder, ValueId x, const SplitRowsAttributes& attributes,
                                const std::string& name) {
  return builder.emit(kSplitRows, Attributes(attributes), {x}, name);
}

ValueId join_rows(Builder& builder, std::span<const ValueId> pieces, const std::string& name) {
  return builder.emit(kJoinRows, Attributes(NoAttributes()), pieces, name)[0];
}

const OpSpec kSplitRows{.name = "split_rows",
                        .infer = infer_split_rows,
                        .differentiate = differentiate_split_rows,
                        .cost = cost_split_rows,
                        .cpu = {.kernel = split_rows_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(split_rows_cuda_kernel)>,
                        .print_attributes = print_split_rows,
                        .samples = samples_split_rows};

const OpSpec kJoinRows{.name = "join_rows",
                       .infer = infer_join_rows,
                       .differentiate = differentiate_join_rows,
                       .cost = cost_join_rows,
                       .cpu = {.kernel = join_rows_kernel},
                       .cuda = only_kernel<TROUPE_CUDA(join_rows_cuda_kernel)>,
                       .samples = samples_join_rows};

}  // namespace troupe
