#include "ops/precision/code_counts/code_counts.h"

#include "ops/choose_kernel.h"
#include "ops/precision/quantize/quantize.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel code_counts_cpu_kernel(const OpView& op);
CudaKernel code_counts_cuda_kernel(const OpView& op);

namespace {

void infer_code_counts(InferContext& context) {
  const Value& codes = context.input(0);
  TROUPE_CHECK(context.input_count() == 1 && is_f8(codes.dtype),
               "code_counts: takes codes in 8 bits: " + codes.name);
  context.output("", DType::i64, {kCountsOfCodes});
}

Cost cost_code_counts(const OpView& op) {
  return {.flops = 2 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

std::vector<OpSample> samples_code_counts() {
  // The same numbers in all dtypes, so that all have the same codes.
  const auto constant = [] {
    SampleBuilder::Options options;
    options.differentiable = false;
    options.dtype = DType::bf16;
    return options;
  };
  // By scales that cover numbers up to 1: a third of the codes is the largest.
  const auto dense = [=](const Shape& shape, DType format) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options options = constant();
      const ValueId x = sample.tensor("x", shape, options);
      options.dtype = DType::f32;
      const Shape scales = shape.rank() == 3 ? Shape{shape[0], 1, 1} : Shape{1, 1};
      const ValueId amax = sample.values(
          "amax", scales, std::vector<double>(static_cast<size_t>(scales.elements()), 1), options);
      const Codes codes = quantize(sample.builder(), x, {}, amax, {.format = format}, "x_q").rows;
      sample.result_without_gradient(code_counts(sample.builder(), codes.codes, "counts"));
    };
  };
  const auto ragged = [=](int32_t live, int64_t columns) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options options = constant();
      options.rows = sample.integers("rows", {1}, {live});
      const ValueId x = sample.tensor("x", {9, columns}, options);
      const Codes codes = quantize(sample.builder(), x, {}, {}, {.block = {1, 32}}, "x_q").rows;
      sample.result_without_gradient(code_counts(sample.builder(), codes.codes, "counts"));
    };
  };
  return {{"e4m3", dense({5, 7}, DType::f8e4m3)},
          {"e5m2", dense({16, 48}, DType::f8e5m2)},
          {"experts", dense({3, 5, 7}, DType::f8e4m3)},
          {"several chunks", dense({301, 333}, DType::f8e4m3)},
          {"ragged rows", ragged(6, 33)},
          {"no live rows", ragged(0, 64)}};
}

}  // namespace

ValueId code_counts(Builder& builder, ValueId codes, const std::string& name) {
  return builder.emit(kCodeCounts, Attributes(NoAttributes()), {codes}, name)[0];
}

const OpSpec kCodeCounts{.name = "code_counts",
                         .infer = infer_code_counts,
                         .cost = cost_code_counts,
                         .cpu = {.kernel = code_counts_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(code_counts_cuda_kernel)>,
                         .samples = samples_code_counts};

}  // namespace troupe
