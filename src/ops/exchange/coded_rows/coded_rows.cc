#include "ops/exchange/coded_rows/coded_rows.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/elementwise/split_rows/split_rows.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel encode_rows_cpu_kernel(const OpView& op);
CpuKernel decode_rows_cpu_kernel(const OpView& op);
CpuKernel round_rows_cpu_kernel(const OpView& op);
CpuKernel round_gradient_cpu_kernel(const OpView& op);
CudaKernel encode_rows_cuda_kernel(const OpView& op);
CudaKernel decode_rows_cuda_kernel(const OpView& op);
CudaKernel round_rows_cuda_kernel(const OpView& op);
CudaKernel round_gradient_cuda_kernel(const OpView& op);

namespace {

void check_rows(const InferContext& context, const std::string& kind) {
  TROUPE_CHECK(context.input_count() == 1, kind + " takes rows");
  const Value& x = context.input(0);
  TROUPE_CHECK(
      is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] % kCodedBlock == 0 && !x.rows.valid(),
      kind + " needs rows of blocks of 32, not ragged: " + x.name);
}

void infer_encode_rows(InferContext& context) {
  check_rows(context, "encode_rows");
  const Shape shape = context.input(0).shape;
  context.output("", DType::u8, {shape[0], coded_row_bytes(shape[1])});
}

void infer_decode_rows(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "decode_rows takes coded rows, received");
  const auto& attributes = context.attributes<DecodeRowsAttributes>();
  const Value coded = context.input(0);
  TROUPE_CHECK(is_float(attributes.dtype) && attributes.elements % kCodedBlock == 0 &&
                   coded.dtype == DType::u8 && coded.shape.rank() == 2 &&
                   coded.shape[1] == coded_row_bytes(attributes.elements),
               "decode_rows: " + coded.name + " " + coded.shape.to_string());
  if (context.has_input(1)) {
    const Value& received = context.input(1);
    TROUPE_CHECK(received.dtype == DType::i32 && received.shape.rank() == 1 &&
                     coded.shape[0] % received.shape[0] == 0 && !coded.rows.valid(),
                 "decode_rows: sections of " + coded.name + " by " + received.name);
  }
  context.output("", attributes.dtype, {coded.shape[0], attributes.elements}, coded.rows);
}

void infer_rounding(InferContext& context) {
  check_rows(context, "a rounding of rows");
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape);
}

void differentiate_round_rows(DerivativeContext& context) {
  if (context.wants(0)) context.add_gradient(0, context.output_gradient(0));
}

void differentiate_round_gradient(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, round_rows(context.builder(), context.output_gradient(0), "d_" + context.input_name(0)));
}

Cost cost_both_once(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

Cost cost_decode_rows(const OpView& op) {
  const int64_t expected = op.attributes<DecodeRowsAttributes>().expected_rows;
  Cost cost = cost_both_once(op);
  if (expected > 0) {
    cost.bytes *= static_cast<double>(expected) / static_cast<double>(op.input(0).shape[0]);
  }
  return cost;
}

std::string print_decode_rows(const Attributes& attributes) {
  const auto& a = attributes.as<DecodeRowsAttributes>();
  std::string text = fmt::format("dtype={} elements={}", name_of(a.dtype), a.elements);
  if (a.expected_rows != 0) text += fmt::format(" expected_rows={}", a.expected_rows);
  return text;
}

// The same numbers in all dtypes, so that all have the same codes.
SampleBuilder::Options constant_bf16() {
  SampleBuilder::Options options;
  options.differentiable = false;
  options.dtype = DType::bf16;
  return options;
}

ValueId decoded(SampleBuilder& sample, ValueId coded, ValueId received, int64_t elements) {
  return decode_rows(sample.builder(), coded, received,
                     {.dtype = DType::bf16, .elements = elements}, "y");
}

// Gradients that are rounded have no finite differences: kinds that have them have no samples.
std::vector<OpSample> samples_of_codes() {
  const auto dense = [](const Shape& shape, double deviation) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options options = constant_bf16();
      options.deviation = deviation;
      const ValueId x = sample.tensor("x", shape, options);
      const ValueId coded = encode_rows(sample.builder(), x, "coded");
      sample.result_without_gradient(decoded(sample, coded, {}, shape[1]));
    };
  };
  const auto sections = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {12, 64}, constant_bf16());
    const ValueId received = sample.integers("received", {3}, {4, 0, 2});
    const ValueId coded = encode_rows(sample.builder(), x, "coded");
    const ValueId y = decoded(sample, coded, received, 64);
    const std::vector<ValueId> pairs = split_rows(sample.builder(), y, {.rows = 2}, "pair");
    for (const size_t pair : {0, 1, 4}) sample.result_without_gradient(pairs[pair]);
  };
  const auto rounded = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {37, 96}, constant_bf16());
    sample.result_without_gradient(round_rows(sample.builder(), x, "y"));
  };
  const auto marked = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5, 32}, constant_bf16());
    sample.result_without_gradient(round_gradient(sample.builder(), x, "y"));
  };
  return {{"smallest", dense({1, 32}, 1)},
          {"rows", dense({37, 96}, 1)},
          {"wide", dense({5, 2048}, 1)},
          {"tiny_numbers", dense({4, 64}, 1e-38)},
          {"huge_numbers", dense({4, 64}, 1e38)},
          {"sections", sections},
          {"rounded", rounded},
          {"marked", marked}};
}

}  // namespace

ValueId encode_rows(Builder& builder, ValueId x, const std::string& name) {
  return builder.emit(kEncodeRows, Attributes(NoAttributes()), {x}, name)[0];
}

ValueId decode_rows(Builder& builder, ValueId coded, ValueId received,
                    const DecodeRowsAttributes& attributes, const std::string& name) {
  return builder.emit(kDecodeRows, Attributes(attributes), {coded, received}, name)[0];
}

ValueId round_rows(Builder& builder, ValueId x, const std::string& name) {
  return builder.emit(kRoundRows, Attributes(NoAttributes()), {x}, name)[0];
}

ValueId round_gradient(Builder& builder, ValueId x, const std::string& name) {
  return builder.emit(kRoundGradient, Attributes(NoAttributes()), {x}, name)[0];
}

const OpSpec kEncodeRows{.name = "encode_rows",
                         .infer = infer_encode_rows,
                         .cost = cost_both_once,
                         .cpu = {.kernel = encode_rows_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(encode_rows_cuda_kernel)>,
                         .samples = samples_of_codes};

const OpSpec kDecodeRows{.name = "decode_rows",
                         .infer = infer_decode_rows,
                         .cost = cost_decode_rows,
                         .cpu = {.kernel = decode_rows_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(decode_rows_cuda_kernel)>,
                         .print_attributes = print_decode_rows};

const OpSpec kRoundRows{.name = "round_rows",
                        .infer = infer_rounding,
                        .differentiate = differentiate_round_rows,
                        .cost = cost_both_once,
                        .cpu = {.kernel = round_rows_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(round_rows_cuda_kernel)>,
                        .in_place = {.output = 0, .input = 0}};

const OpSpec kRoundGradient{.name = "round_gradient",
                            .infer = infer_rounding,
                            .differentiate = differentiate_round_gradient,
                            .cost = cost_both_once,
                            .cpu = {.kernel = round_gradient_cpu_kernel},
                            .cuda = only_kernel<TROUPE_CUDA(round_gradient_cuda_kernel)>,
                            .in_place = {.output = 0, .input = 0}};

}  // namespace troupe
