#include "ops/attention/mla_keys/mla_keys.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/rope/rope.h"
#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel mla_keys_cpu_kernel(const OpView& op);
CpuKernel mla_keys_gradient_cpu_kernel(const OpView& op);
CudaKernel mla_keys_cuda_kernel(const OpView& op);
CudaKernel mla_keys_gradient_cuda_kernel(const OpView& op);

namespace {

enum Input : uint8_t { kKeyValues, kSharedKey, kTable };

void check(const MlaKeysAttributes& attributes, const Value& table, DType dtype) {
  TROUPE_CHECK(attributes.heads >= 1 && attributes.plain_dim >= 0 && attributes.value_dim >= 1 &&
                   attributes.rotary_dim >= 2 && attributes.rotary_dim % 2 == 0 &&
                   attributes.sequence >= 1,
               "mla_keys: impossible sizes");
  TROUPE_CHECK(table.dtype == accumulation_dtype(dtype) && table.shape.rank() == 3 &&
                   table.shape[0] >= attributes.sequence &&
                   table.shape[1] == attributes.rotary_dim / 2 && table.shape[2] == 2,
               "mla_keys: table does not fit: " + table.name + " " + table.shape.to_string());
}

void infer_mla_keys(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "mla_keys: takes kv, k_r and table");
  const auto& attributes = context.attributes<MlaKeysAttributes>();
  const DType dtype = context.input(kKeyValues).dtype;
  const int64_t rows = context.input(kKeyValues).shape[0];
  check(attributes, context.input(kTable), dtype);
  const auto expect = [&](int input, int64_t columns) {
    const Value& value = context.input(input);
    TROUPE_CHECK(is_float(dtype) && value.dtype == dtype && value.shape == Shape({rows, columns}) &&
                     !value.rows.valid(),
                 "mla_keys: " + value.name + " " + value.shape.to_string());
  };
  expect(kKeyValues, attributes.projected_size());
  expect(kSharedKey, attributes.rotary_dim);
  context.output("", dtype, {rows, attributes.row_size()});
}

void infer_mla_keys_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "mla_keys_gradient: takes d_row and table");
  const auto& attributes = context.attributes<MlaKeysAttributes>();
  const Value d_row = context.input(0);
  check(attributes, context.input(1), d_row.dtype);
  TROUPE_CHECK(is_float(d_row.dtype) && d_row.shape.rank() == 2 &&
                   d_row.shape[1] == attributes.row_size() && !d_row.rows.valid(),
               "mla_keys_gradient: " + d_row.name + " " + d_row.shape.to_string());
  const int64_t rows = d_row.shape[0];
  context.output("", d_row.dtype, {rows, attributes.projected_size()});
  context.output("shared_key", d_row.dtype, {rows, attributes.rotary_dim});
}

void differentiate_mla_keys(DerivativeContext& context) {
  if (!context.wants(kKeyValues) && !context.wants(kSharedKey)) return;
  const auto gradients = context.builder().emit(
      kMlaKeysGradient, Attributes(context.attributes<MlaKeysAttributes>()),
      {context.output_gradient(0), context.input(kTable)}, "d_" + context.input_name(kKeyValues));
  for (const Input input : {kKeyValues, kSharedKey}) {
    if (context.wants(input)) context.add_gradient(input, gradients[input]);
  }
}

// A multiplication for each of the two terms of an element that turns, and their sum.
Cost cost_mla_keys(const OpView& op) {
  const auto& attributes = op.attributes<MlaKeysAttributes>();
  const double turned = static_cast<double>(op.output(0).shape[0]) * attributes.rotary_dim;
  double bytes = static_cast<double>(op.output(0).bytes());
  for (int i = 0; i < 3; ++i) bytes += static_cast<double>(op.input(i).bytes());
  return {.flops = 3 * turned, .bytes = bytes};
}

Cost cost_mla_keys_gradient(const OpView& op) {
  const auto& attributes = op.attributes<MlaKeysAttributes>();
  const double rows = static_cast<double>(op.input(0).shape[0]);
  const double turned = rows * attributes.rotary_dim;
  const double summed = rows * (attributes.heads - 1) * attributes.rotary_dim;
  double bytes = static_cast<double>(op.input(0).bytes() + op.input(1).bytes());
  for (int i = 0; i < 2; ++i) bytes += static_cast<double>(op.output(i).bytes());
  return {.flops = 3 * turned + summed, .bytes = bytes};
}

std::string print_mla_keys(const Attributes& attributes) {
  const auto& values = attributes.as<MlaKeysAttributes>();
  return fmt::format("heads={} plain_dim={} rotary_dim={} value_dim={} sequence={} interleaved={}",
                     values.heads, values.plain_dim, values.rotary_dim, values.value_dim,
                     values.sequence, values.interleaved ? 1 : 0);
}

template <SelectCudaKernel kSelect>
KernelChoice choose(const OpView& op, const DeviceTraits& device) {
  const bool packs = moves_packs(op.attributes<MlaKeysAttributes>(), op.input(0).dtype);
  return make_choice(op, device, packs ? "packs" : "elements", kSelect);
}

// `prefix`: of the names.
MlaKeysInputs sample_inputs(SampleBuilder& sample, int64_t tokens,
                            const MlaKeysAttributes& attributes, const std::string& prefix,
                            bool differentiable) {
  const SampleBuilder::Options options{.differentiable = differentiable};
  return {
      .key_values = sample.tensor(prefix + "kv", {tokens, attributes.projected_size()}, options),
      .shared_key = sample.tensor(prefix + "k_r", {tokens, attributes.rotary_dim}, options),
      .table = rope_table(
          sample.builder(),
          {.positions = attributes.sequence + 1, .rotary_dim = attributes.rotary_dim, .base = 50},
          accumulation_dtype(sample.dtype()), prefix + "table")};
}

std::vector<OpSample> samples_mla_keys() {
  const auto rows = [](int64_t tokens, const MlaKeysAttributes& attributes) {
    return [=](SampleBuilder& sample) {
      const MlaKeysInputs inputs = sample_inputs(sample, tokens, attributes, "", true);
      sample.result(mla_keys(sample.builder(), inputs, attributes, "row"));
    };
  };
  const MlaKeysAttributes halves{
      .heads = 3, .plain_dim = 5, .rotary_dim = 6, .value_dim = 4, .sequence = 4};
  MlaKeysAttributes neighbours = halves;
  neighbours.interleaved = true;
  const MlaKeysAttributes packs{.heads = 2,
                                .plain_dim = 8,
                                .rotary_dim = 16,
                                .value_dim = 24,
                                .sequence = 3,
                                .interleaved = true};
  MlaKeysAttributes packs_of_halves = packs;
  packs_of_halves.interleaved = false;
  const MlaKeysAttributes smallest{
      .heads = 1, .plain_dim = 0, .rotary_dim = 2, .value_dim = 1, .sequence = 1};
  // Too much to perturb: only the few rows have a gradient that is checked.
  const auto several_chunks = [=](SampleBuilder& sample) {
    const MlaKeysAttributes many{.heads = 16,
                                 .plain_dim = 16,
                                 .rotary_dim = 8,
                                 .value_dim = 16,
                                 .sequence = 300,
                                 .interleaved = true};
    const MlaKeysInputs inputs = sample_inputs(sample, 600, many, "many_", false);
    const ValueId row = mla_keys(sample.builder(), inputs, many, "many");
    sample.result_without_gradient(row);
    const auto gradients =
        sample.builder().emit(kMlaKeysGradient, Attributes(many), {row, inputs.table}, "many_back");
    for (const ValueId gradient : gradients) sample.result_without_gradient(gradient);
    rows(2, smallest)(sample);
  };
  return {{"halves, two sequences", rows(8, halves)},
          {"interleaved", rows(5, neighbours)},
          {"packs", rows(4, packs)},
          {"packs of halves", rows(3, packs_of_halves)},
          {"smallest", rows(1, smallest)},
          {"several chunks", several_chunks}};
}

}  // namespace

bool moves_packs(const MlaKeysAttributes& attributes, DType dtype) {
  const int32_t rotary = attributes.interleaved ? attributes.rotary_dim : attributes.rotary_dim / 2;
  return is_made_of_packs(attributes.plain_dim, dtype) && is_made_of_packs(rotary, dtype) &&
         is_made_of_packs(attributes.value_dim, dtype);
}

ValueId mla_keys(Builder& builder, const MlaKeysInputs& inputs, const MlaKeysAttributes& attributes,
                 const std::string& name) {
  return builder.emit(kMlaKeys, Attributes(attributes),
                      {inputs.key_values, inputs.shared_key, inputs.table}, name)[0];
}

const OpSpec kMlaKeys{.name = "mla_keys",
                      .infer = infer_mla_keys,
                      .differentiate = differentiate_mla_keys,
                      .cost = cost_mla_keys,
                      .cpu = {.kernel = mla_keys_cpu_kernel},
                      .cuda = choose<TROUPE_CUDA(mla_keys_cuda_kernel)>,
                      .print_attributes = print_mla_keys,
                      .samples = samples_mla_keys};

const OpSpec kMlaKeysGradient{.name = "mla_keys_gradient",
                              .infer = infer_mla_keys_gradient,
                              .cost = cost_mla_keys_gradient,
                              .cpu = {.kernel = mla_keys_gradient_cpu_kernel},
                              .cuda = choose<TROUPE_CUDA(mla_keys_gradient_cuda_kernel)>,
                              .print_attributes = print_mla_keys};

}  // namespace troupe
