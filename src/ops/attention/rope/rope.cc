#include "ops/attention/rope/rope.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel rope_table_cpu_kernel(const OpView& op);
CpuKernel rope_cpu_kernel(const OpView& op);
CudaKernel rope_table_cuda_kernel(const OpView& op);
CudaKernel rope_cuda_kernel(const OpView& op);

namespace {

void infer_rope_table(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 0, "rope_table: takes no inputs");
  const auto& attributes = context.attributes<RopeTableAttributes>();
  TROUPE_CHECK(attributes.positions >= 1 && attributes.rotary_dim >= 2 &&
                   attributes.rotary_dim % 2 == 0 && attributes.base > 0,
               "rope_table: needs positions, an even rotary_dim and a positive base");
  const RopeScaling& scaling = attributes.scaling;
  const bool has_range =
      scaling.kind == RopeScalingKind::llama3 || scaling.kind == RopeScalingKind::yarn;
  TROUPE_CHECK(scaling.factor > 0 && scaling.concentration > 0 &&
                   (!has_range || (scaling.original_positions >= 1 && scaling.slow > 0 &&
                                   scaling.fast >= scaling.slow)),
               "rope_table: impossible scaling");
  TROUPE_CHECK(attributes.chunks.ranks == 1 || attributes.positions % 2 == 0,
               "rope_table: two chunks of a sequence are equally long");
  TROUPE_CHECK(attributes.dtype == DType::f64 || attributes.dtype == DType::f32,
               "rope_table: the dtype is not an accumulation dtype");
  context.output("", attributes.dtype, {attributes.positions, attributes.rotary_dim / 2, 2});
}

void infer_rope(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "rope: takes qkv and table");
  const auto& attributes = context.attributes<RopeAttributes>();
  const Value qkv = context.input(0);
  const Value& table = context.input(1);
  TROUPE_CHECK(
      attributes.heads >= 1 && attributes.groups >= 0 && is_float(qkv.dtype) &&
          qkv.shape.rank() == 2 &&
          qkv.shape[1] == int64_t{attributes.heads + 2 * attributes.groups} * attributes.head_dim,
      "rope: qkv is not [T, (H + 2 G) d]: " + qkv.name + " " + qkv.shape.to_string());
  TROUPE_CHECK(attributes.rotary_dim >= 2 && attributes.rotary_dim % 2 == 0 &&
                   attributes.first >= 0 &&
                   attributes.first + attributes.rotary_dim <= attributes.head_dim &&
                   attributes.sequence >= 1,
               "rope: needs an even rotary_dim within head_dim, and a sequence");
  TROUPE_CHECK(table.dtype == accumulation_dtype(qkv.dtype) && table.shape.rank() == 3 &&
                   table.shape[0] >= attributes.sequence &&
                   table.shape[1] == attributes.rotary_dim / 2 && table.shape[2] == 2,
               "rope: table does not fit: " + table.name + " " + table.shape.to_string());
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
}

void differentiate_rope(DerivativeContext& context) {
  if (!context.wants(0)) return;
  RopeAttributes attributes = context.attributes<RopeAttributes>();
  attributes.inverse = !attributes.inverse;
  context.add_gradient(0, rope(context.builder(), context.output_gradient(0), context.input(1),
                               attributes, "d_" + context.input_name(0)));
}

Cost cost_rope_table(const OpView& op) {
  // A sine and a cosine count as ten flops each.
  return {.flops = 10 * static_cast<double>(op.output(0).shape.elements()),
          .bytes = static_cast<double>(op.output(0).bytes())};
}

// In place, which is almost always: only what turns is read and written.
Cost cost_rope(const OpView& op) {
  const auto& attributes = op.attributes<RopeAttributes>();
  const Value& x = op.input(0);
  const double turned = static_cast<double>(x.shape[0]) * (attributes.heads + attributes.groups) *
                        attributes.rotary_dim;
  return {.flops = 3 * turned,
          .bytes = 2 * turned * static_cast<double>(size_of(x.dtype)) +
                   static_cast<double>(op.input(1).bytes())};
}

std::string print_rope_table(const Attributes& attributes) {
  const auto& values = attributes.as<RopeTableAttributes>();
  const RopeScaling& scaling = values.scaling;
  std::string text = fmt::format("base={}", values.base);
  if (scaling.kind != RopeScalingKind::none) {
    text += fmt::format(" scaling={} factor={}", name_of(scaling.kind), scaling.factor);
  }
  if (scaling.kind == RopeScalingKind::llama3 || scaling.kind == RopeScalingKind::yarn) {
    text += fmt::format(" original_positions={} fast={} slow={}", scaling.original_positions,
                        scaling.fast, scaling.slow);
  }
  if (scaling.kind == RopeScalingKind::yarn && !scaling.round_range) text += " round_range=0";
  if (scaling.concentration != 1) text += fmt::format(" concentration={}", scaling.concentration);
  return text + text_of(RowOrigin{.chunks = values.chunks});
}

std::string print_rope(const Attributes& attributes) {
  const auto& values = attributes.as<RopeAttributes>();
  std::string text = fmt::format(
      "heads={} groups={} head_dim={} rotary_dim={} sequence={} inverse={}", values.heads,
      values.groups, values.head_dim, values.rotary_dim, values.sequence, values.inverse ? 1 : 0);
  if (values.first > 0) text += fmt::format(" first={}", values.first);
  if (values.interleaved) text += " interleaved=1";
  return text;
}

KernelChoice choose_rope(const OpView& op, const DeviceTraits& device) {
  const Value& x = op.input(0);
  const bool packs = rotates_packs(op.attributes<RopeAttributes>(), x.shape[1], x.dtype);
  return make_choice(op, device, packs ? "packs" : "elements", TROUPE_CUDA(rope_cuda_kernel));
}

std::vector<OpSample> samples_rope_table() {
  const auto table = [](int32_t positions, int32_t rotary_dim, double base) {
    return [=](SampleBuilder& sample) {
      sample.result(rope_table(sample.builder(),
                               {.positions = positions, .rotary_dim = rotary_dim, .base = base},
                               accumulation_dtype(sample.dtype()), "table"));
    };
  };
  const auto of_chunks = [](int32_t ranks, int32_t rank) {
    return [=](SampleBuilder& sample) {
      sample.result(
          rope_table(sample.builder(),
                     {.positions = 6, .rotary_dim = 4, .chunks = {.ranks = ranks, .rank = rank}},
                     accumulation_dtype(sample.dtype()), "table"));
    };
  };
  const auto scaled = [](const RopeScaling& scaling) {
    return [=](SampleBuilder& sample) {
      sample.result(rope_table(sample.builder(),
                               {.positions = 9, .rotary_dim = 20, .base = 1000, .scaling = scaling},
                               accumulation_dtype(sample.dtype()), "table"));
    };
  };
  return {{"chunks", of_chunks(2, 1)},
          {"linear scaling", scaled({.kind = RopeScalingKind::linear, .factor = 4})},
          {"llama3 scaling", scaled({.kind = RopeScalingKind::llama3,
                                     .original_positions = 512,
                                     .factor = 8,
                                     .fast = 4,
                                     .slow = 1})},
          {"yarn of one frequency", scaled({.kind = RopeScalingKind::yarn,
                                            .original_positions = 640,
                                            .factor = 32,
                                            .fast = 1,
                                            .slow = 1})},
          {"yarn", scaled({.kind = RopeScalingKind::yarn,
                           .round_range = false,
                           .original_positions = 640,
                           .factor = 40,
                           .fast = 32,
                           .slow = 1,
                           .concentration = 1.25})},
          {"small", table(5, 6, 10000)},
          {"smallest", table(1, 2, 10000)},
          {"wide", table(3, 600, 10000)},
          {"long", table(3001, 16, 1e6)}};
}

std::vector<OpSample> samples_rope() {
  const auto turn = [](int64_t rows, const RopeAttributes& attributes, int32_t positions) {
    return [=](SampleBuilder& sample) {
      const int64_t width = int64_t{attributes.heads + 2 * attributes.groups} * attributes.head_dim;
      const ValueId qkv = sample.tensor("qkv", {rows, width});
      const ValueId table =
          rope_table(sample.builder(),
                     {.positions = positions, .rotary_dim = attributes.rotary_dim, .base = 50},
                     accumulation_dtype(sample.dtype()), "table");
      sample.result(rope(sample.builder(), qkv, table, attributes, "y"));
    };
  };
  // Turning there and back, the second time in place, gives the input.
  const auto there_and_back = [](SampleBuilder& sample) {
    RopeAttributes attributes{
        .heads = 1, .groups = 1, .head_dim = 6, .rotary_dim = 4, .sequence = 3};
    const ValueId qkv = sample.tensor("qkv", {6, 18});
    const ValueId table = rope_table(sample.builder(), {.positions = 4, .rotary_dim = 4},
                                     accumulation_dtype(sample.dtype()), "table");
    const ValueId turned = rope(sample.builder(), qkv, table, attributes, "turned");
    attributes.inverse = true;
    sample.result(rope(sample.builder(), turned, table, attributes, "y"));
  };
  const auto ragged = [](SampleBuilder& sample) {
    const ValueId rows = sample.integers("rows", {1}, {4});
    const ValueId qkv = sample.tensor("qkv", {7, 24}, {.rows = rows});
    const ValueId table = rope_table(sample.builder(), {.positions = 5, .rotary_dim = 6},
                                     accumulation_dtype(sample.dtype()), "table");
    const RopeAttributes attributes{
        .heads = 2, .groups = 1, .head_dim = 6, .rotary_dim = 6, .sequence = 5};
    sample.result(rope(sample.builder(), qkv, table, attributes, "y"));
  };
  // Too much to perturb: only the single row has a gradient.
  const auto several_chunks = [](SampleBuilder& sample) {
    const RopeAttributes attributes{
        .heads = 4, .groups = 2, .head_dim = 8, .rotary_dim = 8, .sequence = 400};
    const ValueId table = rope_table(sample.builder(), {.positions = 400, .rotary_dim = 8},
                                     accumulation_dtype(sample.dtype()), "table");
    const ValueId many = sample.tensor("many", {1200, 64}, {.differentiable = false});
    const ValueId one = sample.tensor("one", {1, 64});
    sample.result_without_gradient(rope(sample.builder(), many, table, attributes, "many_turned"));
    sample.result(rope(sample.builder(), one, table, attributes, "one_turned"));
  };
  const RopeAttributes grouped{
      .heads = 4, .groups = 2, .head_dim = 8, .rotary_dim = 8, .sequence = 3};
  const RopeAttributes partial{
      .heads = 2, .groups = 1, .head_dim = 23, .rotary_dim = 10, .sequence = 5};
  const RopeAttributes inverse{
      .heads = 1, .groups = 1, .head_dim = 34, .rotary_dim = 34, .sequence = 2, .inverse = true};
  const RopeAttributes smallest{
      .heads = 1, .groups = 1, .head_dim = 2, .rotary_dim = 2, .sequence = 1};
  const RopeAttributes queries_alone{
      .heads = 3, .groups = 0, .head_dim = 7, .rotary_dim = 4, .sequence = 4};
  const RopeAttributes end_of_heads{.heads = 2,
                                    .groups = 1,
                                    .head_dim = 11,
                                    .rotary_dim = 6,
                                    .first = 4,
                                    .interleaved = true,
                                    .sequence = 3};
  const RopeAttributes packs{
      .heads = 2, .groups = 0, .head_dim = 40, .rotary_dim = 16, .first = 24, .sequence = 3};
  RopeAttributes interleaved_packs = packs;
  interleaved_packs.interleaved = true;
  return {{"grouped, two sequences", turn(6, grouped, 3)},
          {"partial rotation", turn(5, partial, 9)},
          {"inverse", turn(4, inverse, 2)},
          {"smallest", turn(1, smallest, 1)},
          {"queries alone", turn(5, queries_alone, 4)},
          {"end of heads, interleaved", turn(5, end_of_heads, 4)},
          {"packs at the end of heads", turn(4, packs, 3)},
          {"interleaved packs", turn(4, interleaved_packs, 3)},
          {"there and back", there_and_back},
          {"ragged", ragged},
          {"several chunks", several_chunks}};
}

}  // namespace

bool rotates_packs(const RopeAttributes& attributes, int64_t width, DType dtype) {
  return is_made_of_packs(attributes.rotary_dim / 2, dtype) &&
         is_made_of_packs(attributes.first, dtype) &&
         is_made_of_packs(attributes.head_dim, dtype) && is_made_of_packs(width, dtype);
}

ValueId rope_table(Builder& builder, RopeTableAttributes attributes, DType dtype,
                   const std::string& name) {
  attributes.dtype = dtype;
  return builder.emit(kRopeTable, Attributes(attributes), {}, name)[0];
}

ValueId rope(Builder& builder, ValueId qkv, ValueId table, const RopeAttributes& attributes,
             const std::string& name) {
  return builder.emit(kRope, Attributes(attributes), {qkv, table}, name)[0];
}

const OpSpec kRopeTable{.name = "rope_table",
                        .infer = infer_rope_table,
                        .cost = cost_rope_table,
                        .cpu = {.kernel = rope_table_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(rope_table_cuda_kernel)>,
                        .print_attributes = print_rope_table,
                        .samples = samples_rope_table};

const OpSpec kRope{.name = "rope",
                   .infer = infer_rope,
                   .differentiate = differentiate_rope,
                   .cost = cost_rope,
                   .cpu = {.kernel = rope_cpu_kernel},
                   .cuda = choose_rope,
                   .in_place = {.output = 0, .input = 0},
                   .print_attributes = print_rope,
                   .samples = samples_rope};

}  // namespace troupe
