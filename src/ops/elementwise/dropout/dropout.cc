#include "ops/elementwise/dropout/dropout.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/elementwise/add/add.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel dropout_cpu_kernel(const OpView& op);
CudaKernel dropout_cuda_kernel(const OpView& op);

namespace {

void infer_dropout(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "dropout: takes x and step");
  const Value x = context.input(0);
  const Value& step = context.input(1);
  const double probability = context.attributes<DropoutAttributes>().probability;
  TROUPE_CHECK(is_float(x.dtype), "dropout: x is not of a float dtype: " + x.name);
  TROUPE_CHECK(step.dtype == DType::i64 && step.shape == Shape({1}),
               "dropout: step is not i64 [1]: " + step.name + " " + step.shape.to_string());
  TROUPE_CHECK(probability > 0 && probability < 1, "dropout: probability of dropping " + x.name);
  context.output("", x.dtype, x.shape, x.rows);
}

void differentiate_dropout(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, dropout(context.builder(), context.output_gradient(0), context.input(1),
                 context.attributes<DropoutAttributes>(), "d_" + context.input_name(0)));
}

// The integer arithmetic of random numbers is not counted.
Cost cost_dropout(const OpView& op) {
  return {.flops = static_cast<double>(op.output(0).shape.elements()),
          .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

std::string print_dropout(const Attributes& attributes) {
  const auto& values = attributes.as<DropoutAttributes>();
  return fmt::format("seed={} substream={} probability={}{}", values.seed, values.substream,
                     values.probability, text_of(values.origin));
}

std::vector<OpSample> samples_dropout() {
  const auto dense = [](const Shape& shape, double probability, int64_t step,
                        const RowOrigin& origin = {}) {
    return [=](SampleBuilder& sample) {
      const DropoutAttributes attributes{
          .seed = 7, .substream = 3, .probability = probability, .origin = origin};
      const ValueId x = sample.tensor("x", shape);
      const ValueId at = sample.integers64("step", {1}, {step});
      sample.result(dropout(sample.builder(), x, at, attributes, "y"));
    };
  };
  // Stored over its operand, forward and backward; two places with masks of their own.
  const auto chain = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5, 9});
    const ValueId step = sample.integers64("step", {1}, {4});
    const ValueId twice = add(sample.builder(), x, x, "twice");
    const ValueId first = dropout(sample.builder(), twice, step,
                                  {.seed = 1, .substream = 0, .probability = 0.3}, "first");
    sample.result(dropout(sample.builder(), first, step,
                          {.seed = 1, .substream = 1, .probability = 0.2}, "second"));
  };
  const auto ragged = [](int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {2}, {9, live});
      const ValueId x = sample.tensor("x", {6, 5}, {.rows = rows, .rows_element = 1});
      const ValueId step = sample.integers64("step", {1}, {1});
      sample.result(
          dropout(sample.builder(), x, step, {.seed = 2, .substream = 0, .probability = 0.5}, "y"));
      // Something to differentiate when no row is live.
      const ValueId dense_x = sample.tensor("dense_x", {3});
      sample.result(dropout(sample.builder(), dense_x, step,
                            {.seed = 2, .substream = 1, .probability = 0.5}, "dense_y"));
    };
  };
  // Several chunks, the last one ragged; x is constant, there would be too much to perturb.
  const auto several_chunks = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {3, 21011}, {.differentiable = false});
    const ValueId step = sample.integers64("step", {1}, {2});
    const DropoutAttributes attributes{.seed = 5, .substream = 0, .probability = 0.1};
    sample.result_without_gradient(dropout(sample.builder(), x, step, attributes, "y"));
    const ValueId z = sample.tensor("z", {4});
    sample.result(dropout(sample.builder(), z, step, attributes, "few"));
  };
  return {{"matrix", dense({4, 19}, 0.1, 0)},
          {"four dimensions", dense({2, 3, 5, 7}, 0.5, int64_t{1} << 40)},
          {"one element", dense({1}, 0.25, 3)},
          {"nearly all dropped", dense({7, 11}, 0.95, 1)},
          {"of some rows", dense({4, 19}, 0.4, 2, {.first_row = 3})},
          {"of chunks", dense({8, 5}, 0.4, 2,
                              {.first_row = 4, .sequence = 6, .chunks = {.ranks = 3, .rank = 1}})},
          {"chain in place", chain},
          {"ragged", ragged(4)},
          {"ragged without rows", ragged(0)},
          {"several chunks", several_chunks}};
}

}  // namespace

ValueId dropout(Builder& builder, ValueId input, ValueId step, const DropoutAttributes& attributes,
                const std::string& name) {
  if (attributes.probability == 0) return input;
  return builder.emit(kDropout, Attributes(attributes), {input, step}, name)[0];
}

const OpSpec kDropout{.name = "dropout",
                      .infer = infer_dropout,
                      .differentiate = differentiate_dropout,
                      .cost = cost_dropout,
                      .cpu = {.kernel = dropout_cpu_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(dropout_cuda_kernel)>,
                      .in_place = {.output = 0, .input = 0},
                      .print_attributes = print_dropout,
                      .samples = samples_dropout};

}  // namespace troupe
