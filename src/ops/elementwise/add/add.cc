#include "ops/elementwise/add/add.h"

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel add_cpu_kernel(const OpView& op);
CudaKernel add_cuda_kernel(const OpView& op);

namespace {

void infer_add(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "add: takes a and b");
  const Value a = context.input(0);
  const Value& b = context.input(1);
  TROUPE_CHECK(
      is_float(a.dtype) && a.dtype == b.dtype && a.shape == b.shape && a.rows == b.rows,
      "add: " + a.name + " " + a.shape.to_string() + " and " + b.name + " " + b.shape.to_string());
  context.output("", a.dtype, a.shape, a.rows);
}

void differentiate_add(DerivativeContext& context) {
  const ValueId dy = context.output_gradient(0);
  for (const int input : {0, 1}) {
    if (context.wants(input)) context.add_gradient(input, dy);
  }
}

Cost cost_add(const OpView& op) {
  return {.flops = static_cast<double>(op.output(0).shape.elements()),
          .bytes = 3 * static_cast<double>(op.output(0).bytes())};
}

std::vector<OpSample> samples_add() {
  const auto dense = [](const Shape& shape) {
    return [=](SampleBuilder& sample) {
      const ValueId a = sample.tensor("a", shape);
      const ValueId b = sample.tensor("b", shape);
      sample.result(add(sample.builder(), a, b, "y"));
    };
  };
  const auto twice = [](SampleBuilder& sample) {
    const ValueId a = sample.tensor("a", {3, 7});
    sample.result(add(sample.builder(), a, a, "y"));
  };
  const auto chain = [](SampleBuilder& sample) {
    const ValueId a = sample.tensor("a", {2, 9});
    const ValueId b = sample.tensor("b", {2, 9});
    const ValueId c = sample.tensor("c", {2, 9});
    sample.result(add(sample.builder(), add(sample.builder(), a, b, "ab"), c, "abc"));
  };
  const auto ragged = [](int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {2}, {9, live});
      const SampleBuilder::Options options{.rows = rows, .rows_element = 1};
      const ValueId a = sample.tensor("a", {6, 5}, options);
      const ValueId b = sample.tensor("b", {6, 5}, options);
      sample.result(add(sample.builder(), a, b, "y"));
      const ValueId c = sample.tensor("c", {3});
      sample.result(add(sample.builder(), c, c, "z"));
    };
  };
  const auto long_rows = [](SampleBuilder& sample) {
    const SampleBuilder::Options constant{.differentiable = false};
    const ValueId a = sample.tensor("a", {3, 30011}, constant);
    const ValueId b = sample.tensor("b", {3, 30011}, constant);
    const ValueId sum = add(sample.builder(), a, b, "sum");
    sample.result_without_gradient(sum);
    const ValueId c = sample.tensor("c", {4});
    const ValueId d = sample.tensor("d", {4});
    sample.result(add(sample.builder(), c, d, "y"));
  };
  return {{"matrix", dense({4, 19})},   {"scalar", dense({})}, {"same value twice", twice},
          {"chain in place", chain},    {"ragged", ragged(4)}, {"ragged without rows", ragged(0)},
          {"several chunks", long_rows}};
}

}  // namespace

ValueId add(Builder& builder, ValueId a, ValueId b, const std::string& name) {
  return builder.emit(kAdd, Attributes(NoAttributes()), {a, b}, name)[0];
}

const OpSpec kAdd{.name = "add",
                  .infer = infer_add,
                  .differentiate = differentiate_add,
                  .cost = cost_add,
                  .cpu = {.kernel = add_cpu_kernel},
                  .cuda = only_kernel<TROUPE_CUDA(add_cuda_kernel)>,
                  .in_place = {.output = 0, .input = 0},
                  .samples = samples_add};

}  // namespace troupe
