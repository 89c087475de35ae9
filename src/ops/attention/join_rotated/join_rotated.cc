#include "ops/attention/join_rotated/join_rotated.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/rope/rope.h"
#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel join_rotated_cpu_kernel(const OpView& op);
CpuKernel join_rotated_gradient_cpu_kernel(const OpView& op);
CudaKernel join_rotated_cuda_kernel(const OpView& op);
CudaKernel join_rotated_gradient_cuda_kernel(const OpView& op);

namespace {

void check_join_rotated(const JoinRotatedAttributes& a, const Value& table, DType dtype) {
  TROUPE_CHECK(a.heads >= 1 && a.plain_dim >= 1 && a.rotary_dim >= 2 && a.rotary_dim % 2 == 0 &&
                   a.sequence >= 1,
               "join_rotated: impossible sizes");
  TROUPE_CHECK(table.dtype == accumulation_dtype(dtype) && table.shape.rank() == 3 &&
                   table.shape[0] >= a.sequence && table.shape[1] == a.rotary_dim / 2 &&
                   table.shape[2] == 2,
               "join_rotated: table does not fit: " + table.name + " " + table.shape.to_string());
}

void infer_join_rotated(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "join_rotated: takes a, b and table");
  const auto& attributes = context.attributes<JoinRotatedAttributes>();
  const Value a = context.input(0);
  const Value b = context.input(1);
  check_join_rotated(attributes, context.input(2), a.dtype);
  TROUPE_CHECK(
      is_float(a.dtype) && b.dtype == a.dtype && !a.rows.valid() && !b.rows.valid() &&
          a.shape.rank() == 2 && a.shape[1] == int64_t{attributes.heads} * attributes.plain_dim &&
          b.shape == Shape({a.shape[0], int64_t{attributes.heads} * attributes.rotary_dim}),
      "join_rotated: " + a.name + " " + a.shape.to_string() + " and " + b.name + " " +
          b.shape.to_string());
  context.output("", a.dtype, {a.shape[0], int64_t{attributes.heads} * attributes.head_dim()});
}

void infer_join_rotated_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "join_rotated_gradient: takes dy and table");
  const auto& attributes = context.attributes<JoinRotatedAttributes>();
  const Value dy = context.input(0);
  check_join_rotated(attributes, context.input(1), dy.dtype);
  TROUPE_CHECK(is_float(dy.dtype) && !dy.rows.valid() && dy.shape.rank() == 2 &&
                   dy.shape[1] == int64_t{attributes.heads} * attributes.head_dim(),
               "join_rotated_gradient: " + dy.name + " " + dy.shape.to_string());
  context.output("", dy.dtype, {dy.shape[0], int64_t{attributes.heads} * attributes.plain_dim});
  context.output("turning", dy.dtype,
                 {dy.shape[0], int64_t{attributes.heads} * attributes.rotary_dim});
}

void differentiate_join_rotated(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kJoinRotatedGradient, Attributes(context.attributes<JoinRotatedAttributes>()),
      {context.output_gradient(0), context.input(2)}, "d_" + context.input_name(0));
  for (const int input : {0, 1}) {
    if (context.wants(input)) context.add_gradient(input, gradients[static_cast<size_t>(input)]);
  }
}

// Three for each element that turns. `rows`: the joined ones.
Cost cost_of_turning(const OpView& op, const Value& rows) {
  const auto& a = op.attributes<JoinRotatedAttributes>();
  return {.flops = 3.0 * static_cast<double>(rows.shape[0]) * a.heads * a.rotary_dim,
          .bytes = 2 * static_cast<double>(rows.bytes())};
}

Cost cost_join_rotated(const OpView& op) {
  return cost_of_turning(op, op.output(0));
}

Cost cost_join_rotated_gradient(const OpView& op) {
  return cost_of_turning(op, op.input(0));
}

std::string print_join_rotated(const Attributes& attributes) {
  const auto& a = attributes.as<JoinRotatedAttributes>();
  return fmt::format("heads={} plain_dim={} rotary_dim={} sequence={} interleaved={}", a.heads,
                     a.plain_dim, a.rotary_dim, a.sequence, a.interleaved ? 1 : 0);
}

template <SelectCudaKernel kSelect>
KernelChoice choose_join_rotated(const OpView& op, const DeviceTraits& device) {
  const bool packs = joins_packs(op.attributes<JoinRotatedAttributes>(), op.input(0).dtype);
  return make_choice(op, device, packs ? "packs" : "elements", kSelect);
}

std::vector<OpSample> samples_join_rotated() {
  const auto join = [](int64_t tokens, const JoinRotatedAttributes& a) {
    return [=](SampleBuilder& sample) {
      const ValueId plain = sample.tensor("a", {tokens, int64_t{a.heads} * a.plain_dim});
      const ValueId turning = sample.tensor("b", {tokens, int64_t{a.heads} * a.rotary_dim});
      const ValueId table = rope_table(
          sample.builder(), {.positions = a.sequence + 1, .rotary_dim = a.rotary_dim, .base = 50},
          accumulation_dtype(sample.dtype()), "table");
      sample.result(join_rotated(sample.builder(), plain, turning, table, a, "y"));
    };
  };
  return {
      {"halves", join(8, {.heads = 3, .plain_dim = 5, .rotary_dim = 6, .sequence = 4})},
      {"interleaved",
       join(5, {.heads = 2, .plain_dim = 3, .rotary_dim = 4, .sequence = 3, .interleaved = true})},
      {"one head", join(3, {.plain_dim = 16, .rotary_dim = 8, .sequence = 3, .interleaved = true})},
      {"smallest", join(1, {.plain_dim = 1, .rotary_dim = 2, .sequence = 1})}};
}

}  // namespace

bool joins_packs(const JoinRotatedAttributes& attributes, DType dtype) {
  const int32_t rotary = attributes.interleaved ? attributes.rotary_dim : attributes.rotary_dim / 2;
  return is_made_of_packs(attributes.plain_dim, dtype) && is_made_of_packs(rotary, dtype);
}

ValueId join_rotated(Builder& builder, ValueId plain, ValueId turning, ValueId table,
                     const JoinRotatedAttributes& attributes, const std::string& name) {
  return builder.emit(kJoinRotated, Attributes(attributes), {plain, turning, table}, name)[0];
}

const OpSpec kJoinRotated{.name = "join_rotated",
                          .infer = infer_join_rotated,
                          .differentiate = differentiate_join_rotated,
                          .cost = cost_join_rotated,
                          .cpu = {.kernel = join_rotated_cpu_kernel},
                          .cuda = choose_join_rotated<TROUPE_CUDA(join_rotated_cuda_kernel)>,
                          .print_attributes = print_join_rotated,
                          .samples = samples_join_rotated};

const OpSpec kJoinRotatedGradient{
    .name = "join_rotated_gradient",
    .infer = infer_join_rotated_gradient,
    .cost = cost_join_rotated_gradient,
    .cpu = {.kernel = join_rotated_gradient_cpu_kernel},
    .cuda = choose_join_rotated<TROUPE_CUDA(join_rotated_gradient_cuda_kernel)>,
    .print_attributes = print_join_rotated};

}  // namespace troupe
