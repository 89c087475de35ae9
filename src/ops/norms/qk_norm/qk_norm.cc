#include "ops/norms/qk_norm/qk_norm.h"

#include <algorithm>
#include <fmt/format.h>

#include "ops/attention/rope/rope.h"
#include "ops/choose_kernel.h"
#include "ops/cpu/row_sums.h"
#include "ops/elementwise/add/add.h"
#include "ops/norms/qk_norm/qk_norm_cuda.h"
#include "ops/row_sum_pieces.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel qk_norm_rope_cpu_kernel(const OpView& op);
CpuKernel qk_norm_rope_gradient_cpu_kernel(const OpView& op);
CpuKernel qk_norm_rope_weight_gradient_cpu_kernel(const OpView& op);
CpuKernel qk_squares_cpu_kernel(const OpView& op);
CpuKernel qk_squares_gradient_cpu_kernel(const OpView& op);
CudaKernel qk_norm_rope_cuda_kernel(const OpView& op);
CudaKernel qk_norm_rope_gradient_cuda_kernel(const OpView& op);
CudaKernel qk_norm_rope_weight_gradient_cuda_kernel(const OpView& op);
CudaKernel qk_squares_cuda_kernel(const OpView& op);
CudaKernel qk_squares_gradient_cuda_kernel(const OpView& op);

namespace {

template <class Heads>
bool is_fused_projection(const Value& value, const Heads& attributes) {
  return attributes.heads >= 1 && attributes.groups >= 1 && attributes.head_dim >= 1 &&
         is_float(value.dtype) && value.shape.rank() == 2 &&
         value.shape[1] == int64_t{attributes.heads + 2 * attributes.groups} * attributes.head_dim;
}

// `heads` heads that share a gain.
bool is_qk_gain(const Value& gamma, const Value& qkv, const QkNormAttributes& attributes,
                int32_t heads) {
  const int64_t vector_heads = attributes.scope == QkNormScope::head ? 1 : heads;
  return gamma.dtype == accumulation_dtype(qkv.dtype) &&
         gamma.shape == Shape({vector_heads * attributes.head_dim});
}

bool are_qk_gains(const Value& gamma_q, const Value& gamma_k, const Value& qkv,
                  const QkNormAttributes& attributes) {
  return is_qk_gain(gamma_q, qkv, attributes, attributes.heads) &&
         is_qk_gain(gamma_k, qkv, attributes, attributes.groups);
}

template <class Heads>
int64_t normalized_vectors(const Heads& attributes) {
  return attributes.scope == QkNormScope::head ? attributes.heads + attributes.groups : 2;
}

template <class Heads>
bool is_qk_statistic(const Value& rstd, const Value& qkv, const Heads& attributes) {
  return rstd.dtype == accumulation_dtype(qkv.dtype) &&
         rstd.shape == Shape({qkv.shape[0], normalized_vectors(attributes)});
}

// The rotation, and the table that it is taken from.
template <class Heads>
bool is_rotation(const Value& table, const Value& qkv, const Heads& attributes) {
  const int32_t rotary = attributes.rotary_dim;
  return rotary >= 2 && rotary % 2 == 0 && rotary <= attributes.head_dim &&
         attributes.sequence >= 1 && table.dtype == accumulation_dtype(qkv.dtype) &&
         table.shape.rank() == 3 && table.shape[0] >= attributes.sequence &&
         table.shape[1] == rotary / 2 && table.shape[2] == 2;
}

bool is_gradient_of(const Value& dy, const Value& qkv) {
  return dy.dtype == qkv.dtype && dy.shape == qkv.shape && dy.rows == qkv.rows;
}

// Of queries and keys.
Shape qk_squares_shape(const Value& qkv) {
  return {qkv.shape[0], 2};
}

void check_qk_squares(const InferContext& context, int input, const Value& qkv,
                      const QkNormAttributes& attributes) {
  TROUPE_CHECK(attributes.ranks == 1 || context.has_input(input),
               "qk_norm: heads of other ranks without their squares");
  if (!context.has_input(input)) return;
  const Value& squares = context.input(input);
  TROUPE_CHECK(attributes.scope == QkNormScope::projection && attributes.ranks >= 1 &&
                   squares.dtype == accumulation_dtype(qkv.dtype) &&
                   squares.shape == qk_squares_shape(qkv) && squares.rows == qkv.rows,
               "qk_norm: squares do not belong to " + qkv.name);
}

void infer_qk_norm_rope(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "qk_norm_rope: takes qkv, gamma_q, gamma_k, table and squares");
  const auto& attributes = context.attributes<QkNormAttributes>();
  const Value qkv = context.input(0);
  TROUPE_CHECK(is_fused_projection(qkv, attributes), "qk_norm_rope: qkv is not [T, (H + 2 G) d]: " +
                                                         qkv.name + " " + qkv.shape.to_string());
  TROUPE_CHECK(are_qk_gains(context.input(1), context.input(2), qkv, attributes),
               "qk_norm_rope: a gain has another shape or dtype than what it multiplies needs: " +
                   context.input(1).name + ", " + context.input(2).name);
  TROUPE_CHECK(is_rotation(context.input(3), qkv, attributes),
               "qk_norm_rope: needs an even rotary_dim up to head_dim, a sequence, and a table of "
               "both: " +
                   context.input(3).name + " " + context.input(3).shape.to_string());
  check_qk_squares(context, 4, qkv, attributes);
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
  context.output("rstd", accumulation_dtype(qkv.dtype),
                 {qkv.shape[0], normalized_vectors(attributes)}, qkv.rows);
}

void infer_qk_norm_rope_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 7,
               "qk_norm_rope_gradient: takes dy, qkv, gamma_q, gamma_k, table, rstd and squares");
  const auto& attributes = context.attributes<QkNormAttributes>();
  const Value qkv = context.input(1);
  TROUPE_CHECK(is_fused_projection(qkv, attributes) && is_gradient_of(context.input(0), qkv) &&
                   are_qk_gains(context.input(2), context.input(3), qkv, attributes) &&
                   is_rotation(context.input(4), qkv, attributes) &&
                   is_qk_statistic(context.input(5), qkv, attributes),
               "qk_norm_rope_gradient: operands do not belong to " + qkv.name);
  check_qk_squares(context, 6, qkv, attributes);
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
  if (!context.has_input(6)) return;
  context.output("squares", accumulation_dtype(qkv.dtype), qk_squares_shape(qkv), qkv.rows);
}

void infer_qk_squares(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "qk_squares: takes qkv");
  const auto& attributes = context.attributes<QkNormAttributes>();
  const Value& qkv = context.input(0);
  TROUPE_CHECK(
      is_fused_projection(qkv, attributes) && attributes.scope == QkNormScope::projection,
      "qk_squares: qkv is not [T, (H + 2 G) d]: " + qkv.name + " " + qkv.shape.to_string());
  context.output("", accumulation_dtype(qkv.dtype), qk_squares_shape(qkv), qkv.rows);
}

void infer_qk_squares_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "qk_squares_gradient: takes d_squares and qkv");
  const Value& d_squares = context.input(0);
  const Value& qkv = context.input(1);
  TROUPE_CHECK(is_fused_projection(qkv, context.attributes<QkNormAttributes>()) &&
                   d_squares.dtype == accumulation_dtype(qkv.dtype) &&
                   d_squares.shape == qk_squares_shape(qkv),
               "qk_squares_gradient: d_squares does not belong to " + qkv.name);
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
}

void differentiate_qk_squares(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(0, context.builder().emit(kQkSquaresGradient,
                                                 Attributes(context.attributes<QkNormAttributes>()),
                                                 {context.output_gradient(0), context.input(0)},
                                                 "d_" + context.input_name(0))[0]);
}

void infer_qk_norm_rope_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "qk_norm_rope_weight_gradient: takes dy, qkv, table, rstd and target");
  const auto& attributes = context.attributes<QkNormWeightGradientAttributes>();
  const Value qkv = context.input(1);
  const bool queries = attributes.first_head == 0 && attributes.head_count == attributes.heads;
  const bool keys =
      attributes.first_head == attributes.heads && attributes.head_count == attributes.groups;
  TROUPE_CHECK(is_fused_projection(qkv, attributes) && is_gradient_of(context.input(0), qkv) &&
                   is_rotation(context.input(2), qkv, attributes) &&
                   is_qk_statistic(context.input(3), qkv, attributes) && (queries || keys),
               "qk_norm_rope_weight_gradient: operands do not belong to " + qkv.name);
  const int64_t vector_heads = attributes.scope == QkNormScope::head ? 1 : attributes.head_count;
  declare_weight_gradient(context, 4, "", accumulation_dtype(qkv.dtype),
                          {vector_heads * attributes.head_dim});
}

// The gains come first: d_qkv may then take the place of dy.
void differentiate_qk_norm_rope(DerivativeContext& context) {
  Builder& builder = context.builder();
  const auto attributes = context.attributes<QkNormAttributes>();
  const ValueId dy = context.output_gradient(0);
  const ValueId qkv = context.input(0);
  const ValueId table = context.input(3);
  const ValueId rstd = context.output(1);
  if (!dy.valid()) return;
  for (const int gain : {1, 2}) {
    if (!context.wants(gain)) continue;
    const auto target = context.weight_target(gain);
    const QkNormWeightGradientAttributes weight_attributes{
        .heads = attributes.heads,
        .groups = attributes.groups,
        .head_dim = attributes.head_dim,
        .rotary_dim = attributes.rotary_dim,
        .sequence = attributes.sequence,
        .first_head = gain == 1 ? 0 : attributes.heads,
        .head_count = gain == 1 ? attributes.heads : attributes.groups,
        .scope = attributes.scope,
        .accumulate = target.accumulate};
    context.add_weight_gradient(
        gain,
        builder.emit(kQkNormRopeWeightGradient, Attributes(weight_attributes),
                     {dy, qkv, table, rstd, target.target}, "d_" + context.input_name(gain))[0]);
  }
  if (!context.wants(0) && !context.wants(4)) return;
  const auto gradients =
      builder.emit(kQkNormRopeGradient, Attributes(attributes),
                   {dy, qkv, context.input(1), context.input(2), table, rstd, context.input(4)},
                   "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(4)) context.add_gradient(4, gradients[1]);
}

double qk_norm_normalized_elements(const OpView& op) {
  const auto& attributes = op.attributes<QkNormAttributes>();
  return static_cast<double>(op.input(0).shape[0]) * (attributes.heads + attributes.groups) *
         attributes.head_dim;
}

// The norm, and three operations for each element that turns.
double qk_norm_rope_turned_elements(const OpView& op) {
  const auto& attributes = op.attributes<QkNormAttributes>();
  return static_cast<double>(op.input(0).shape[0]) * (attributes.heads + attributes.groups) *
         attributes.rotary_dim;
}

Cost cost_qk_norm_rope(const OpView& op) {
  return {.flops = 4 * qk_norm_normalized_elements(op) + 3 * qk_norm_rope_turned_elements(op),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(1).bytes() +
                                       op.input(2).bytes() + op.input(3).bytes() +
                                       op.output(1).bytes())};
}

Cost cost_qk_norm_rope_gradient(const OpView& op) {
  return {.flops = 8 * qk_norm_normalized_elements(op) + 3 * qk_norm_rope_turned_elements(op),
          .bytes =
              static_cast<double>(3 * op.input(0).bytes() + op.input(2).bytes() +
                                  op.input(3).bytes() + op.input(4).bytes() + op.input(5).bytes())};
}

Cost cost_qk_norm_rope_weight_gradient(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const auto rows = static_cast<double>(op.input(0).shape[0]);
  const double heads = rows * attributes.head_count;
  const double elements = heads * attributes.head_dim;
  const double vectors = attributes.scope == QkNormScope::head ? heads : rows;
  return {.flops = 3 * elements + 3 * heads * attributes.rotary_dim,
          .bytes = 2 * elements * static_cast<double>(size_of(op.input(0).dtype)) +
                   static_cast<double>(op.input(2).bytes()) +
                   vectors * static_cast<double>(size_of(op.input(3).dtype)) +
                   (attributes.accumulate ? 2 : 1) * static_cast<double>(op.output(0).bytes())};
}

// A product and a sum; twice the product with a number.
Cost cost_qk_squares(const OpView& op) {
  return {.flops = 2 * qk_norm_normalized_elements(op),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

Cost cost_qk_squares_gradient(const OpView& op) {
  return {.flops = static_cast<double>(op.output(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.output(0).bytes())};
}

// What arrives at the longest vector.
uint64_t scratch_qk_norm_rope_gradient(const OpView& op) {
  const auto& attributes = op.attributes<QkNormAttributes>();
  const bool per_head = attributes.scope == QkNormScope::head;
  const int64_t heads = per_head ? 1 : std::max(attributes.heads, attributes.groups);
  return static_cast<uint64_t>(heads * attributes.head_dim) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

uint64_t workspace_qk_norm_rope_weight_gradient(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const RowPieces pieces =
      row_pieces(op.input(0).shape[0], int64_t{attributes.head_count} * attributes.head_dim);
  return static_cast<uint64_t>(pieces.count) * op.output(0).bytes();
}

const char* qk_norm_scope_text(QkNormScope scope) {
  return scope == QkNormScope::head ? "" : " scope=projection";
}

std::string qk_rotation_text(int32_t rotary_dim, int32_t sequence) {
  return rotary_dim == 0 ? "" : fmt::format(" rotary_dim={} sequence={}", rotary_dim, sequence);
}

std::string print_qk_norm(const Attributes& attributes) {
  const auto& values = attributes.as<QkNormAttributes>();
  return fmt::format("heads={} groups={} head_dim={} epsilon={}{}{}{}{}", values.heads,
                     values.groups, values.head_dim, values.epsilon,
                     qk_norm_scope_text(values.scope),
                     values.zero_centered ? " zero_centered=1" : "",
                     values.ranks > 1 ? fmt::format(" ranks={}", values.ranks) : "",
                     qk_rotation_text(values.rotary_dim, values.sequence));
}

std::string print_qk_norm_rope_weight_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<QkNormWeightGradientAttributes>();
  return fmt::format("heads={} groups={} head_dim={} first_head={} head_count={} accumulate={}{}{}",
                     values.heads, values.groups, values.head_dim, values.first_head,
                     values.head_count, values.accumulate ? 1 : 0, qk_norm_scope_text(values.scope),
                     qk_rotation_text(values.rotary_dim, values.sequence));
}

uint64_t qk_norm_rope_weight_gradient_cuda_scratch_bytes(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const int64_t vectors = attributes.scope == QkNormScope::head ? attributes.head_count : 1;
  return row_sums_bytes(op.input(0).dtype, op.input(0).shape[0] * vectors,
                        op.output(0).shape.elements());
}

// Of both directions. In place a kernel goes through the heads that are normalised, elsewhere
// through all: whether the memory plan stores the result over the operand can decide.
template <SelectCudaKernel kSelect>
KernelChoice choose_qk_norm(const OpView& op, const DeviceTraits& device) {
  const auto& attributes = op.attributes<QkNormAttributes>();
  const DType dtype = op.input(0).dtype;
  const bool packs = heads_are_made_of_packs(attributes, dtype);
  const int pack = 16 / static_cast<int>(size_of(dtype));
  const QkSteps steps(attributes, packs ? pack : 1);
  const int normalized = attributes.heads + attributes.groups;
  const bool in_place = takes_rounds(attributes, steps, packs, normalized);
  const char* variant = packs ? "packs" : "elements";
  if (in_place) {
    const bool always = takes_rounds(attributes, steps, packs, normalized + attributes.groups);
    variant = always ? "rounds" : "rounds if in place";
  }
  return make_choice(op, device, variant, kSelect);
}

KernelChoice choose_qk_gain_gradient(const OpView& op, const DeviceTraits& device) {
  const bool packs =
      heads_are_made_of_packs(op.attributes<QkNormWeightGradientAttributes>(), op.input(0).dtype);
  return make_choice(op, device, packs ? "packs" : "elements",
                     TROUPE_CUDA(qk_norm_rope_weight_gradient_cuda_kernel),
                     qk_norm_rope_weight_gradient_cuda_scratch_bytes);
}

std::vector<OpSample> samples_qk_norm_rope() {
  const auto table_of = [](SampleBuilder& sample, const QkNormAttributes& attributes) {
    return rope_table(
        sample.builder(),
        {.positions = attributes.sequence + 1, .rotary_dim = attributes.rotary_dim, .base = 50},
        accumulation_dtype(sample.dtype()), "table");
  };
  const auto norm = [=](SampleBuilder& sample, const QkNormAttributes& attributes, int64_t rows,
                        const SampleBuilder::Options& options) {
    const bool per_head = attributes.scope == QkNormScope::head;
    const int64_t d = attributes.head_dim;
    const ValueId qkv =
        sample.tensor("qkv", {rows, (attributes.heads + 2 * attributes.groups) * d}, options);
    const ValueId gamma_q =
        sample.tensor("gamma_q", {per_head ? d : attributes.heads * d}, {.accumulation = true});
    const ValueId gamma_k =
        sample.tensor("gamma_k", {per_head ? d : attributes.groups * d}, {.accumulation = true});
    const ValueId table = table_of(sample, attributes);
    sample.result(qk_norm_rope(sample.builder(),
                               {.qkv = qkv, .gamma_q = gamma_q, .gamma_k = gamma_k, .table = table},
                               attributes, "y"));
  };
  // Squares of qkv itself, and those of others' heads besides.
  const auto with_squares = [=](bool of_others, int32_t ranks, int64_t rows) {
    return [=](SampleBuilder& sample) {
      const QkNormAttributes attributes{.heads = 4,
                                        .groups = 2,
                                        .head_dim = 5,
                                        .epsilon = 0.01,
                                        .scope = QkNormScope::projection,
                                        .ranks = ranks,
                                        .rotary_dim = 4,
                                        .sequence = 2};
      const ValueId qkv = sample.tensor("qkv", {rows, 40});
      ValueId squares = qk_squares(sample.builder(), qkv, attributes, "squares");
      if (of_others) {
        const ValueId others =
            sample.tensor("others", {rows, 2}, {.mean = 30, .accumulation = true});
        squares = add(sample.builder(), squares, others, "all_squares");
      }
      const QkNormInputs inputs{.qkv = qkv,
                                .gamma_q = sample.tensor("gamma_q", {20}, {.accumulation = true}),
                                .gamma_k = sample.tensor("gamma_k", {10}, {.accumulation = true}),
                                .table = table_of(sample, attributes),
                                .squares = squares};
      sample.result(qk_norm_rope(sample.builder(), inputs, attributes, "y"));
    };
  };
  struct Heads {
    int32_t heads, groups, head_dim, rotary_dim;
  };
  const auto dense = [=](int64_t rows, const Heads& heads, QkNormScope scope,
                         bool differentiable = true, bool zero_centered = false) {
    return [=](SampleBuilder& sample) {
      norm(sample,
           {.heads = heads.heads,
            .groups = heads.groups,
            .head_dim = heads.head_dim,
            .epsilon = 0.01,
            .scope = scope,
            .zero_centered = zero_centered,
            .rotary_dim = heads.rotary_dim,
            .sequence = static_cast<int32_t>(rows / 2 + 1)},
           rows, {.differentiable = differentiable});
    };
  };
  const auto ragged = [=](QkNormScope scope, int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {1}, {live});
      norm(sample,
           {.heads = 2,
            .groups = 1,
            .head_dim = 4,
            .epsilon = 1e-6,
            .scope = scope,
            .rotary_dim = 4,
            .sequence = 2},
           5, {.rows = rows});
    };
  };
  // Stored over what it is made of, and its gradient over what arrives.
  const auto in_place = [=](QkNormScope scope) {
    return [=](SampleBuilder& sample) {
      const QkNormAttributes attributes{.heads = 2,
                                        .groups = 1,
                                        .head_dim = 6,
                                        .epsilon = 0.01,
                                        .scope = scope,
                                        .rotary_dim = 4,
                                        .sequence = 2};
      const bool per_head = scope == QkNormScope::head;
      const SampleBuilder::Options constant{.differentiable = false};
      const SampleBuilder::Options gain{.accumulation = true};
      const ValueId a = sample.tensor("a", {3, 24}, constant);
      const ValueId b = sample.tensor("b", {3, 24}, constant);
      QkNormInputs inputs{.qkv = add(sample.builder(), a, b, "qkv"),
                          .gamma_q = sample.tensor("gamma_q", {per_head ? 6 : 12}, gain),
                          .gamma_k = sample.tensor("gamma_k", {6}, gain),
                          .table = table_of(sample, attributes)};
      inputs.qkv = qk_norm_rope(sample.builder(), inputs, attributes, "once");
      const ValueId twice = qk_norm_rope(sample.builder(), inputs, attributes, "twice");
      sample.result(add(sample.builder(), twice, twice, "y"));
      const ValueId c = add(sample.builder(), a, b, "c");
      inputs.qkv = c;
      inputs.gamma_q = sample.tensor("other_q", {per_head ? 6 : 12},
                                     {.differentiable = false, .accumulation = true});
      inputs.gamma_k =
          sample.tensor("other_k", {6}, {.differentiable = false, .accumulation = true});
      sample.result_without_gradient(qk_norm_rope(sample.builder(), inputs, attributes, "over"));
    };
  };
  constexpr QkNormScope kHead = QkNormScope::head;
  constexpr QkNormScope kProjection = QkNormScope::projection;
  return {{"grouped", dense(3, {4, 2, 10, 10}, kHead)},
          {"partial rotation", dense(3, {2, 1, 11, 6}, kHead)},
          {"packs", dense(2, {3, 1, 32, 32}, kHead)},
          {"packs, partial rotation", dense(2, {2, 1, 40, 16}, kHead)},
          {"one head each", dense(2, {1, 1, 18, 18}, kHead)},
          {"smallest", dense(1, {1, 1, 2, 2}, kHead)},
          {"ragged", ragged(kHead, 3)},
          {"many rows", dense(2500, {2, 1, 8, 8}, kHead, false)},
          {"zero centered", dense(3, {4, 2, 6, 6}, kHead, true, true)},
          {"in place", in_place(kHead)},
          {"projection, zero centered", dense(3, {4, 2, 6, 6}, kProjection, true, true)},
          {"projection, grouped", dense(3, {4, 2, 10, 10}, kProjection)},
          {"projection, partial rotation", dense(3, {2, 2, 7, 4}, kProjection)},
          {"projection, packs", dense(2, {3, 1, 32, 32}, kProjection)},
          {"projection, one head each", dense(2, {1, 1, 18, 18}, kProjection)},
          {"projection, ragged", ragged(kProjection, 3)},
          {"projection, ragged without rows", ragged(kProjection, 0)},
          {"projection, in place", in_place(kProjection)},
          {"projection, own squares", with_squares(false, 1, 3)},
          {"projection, squares of others", with_squares(true, 3, 2)},
          {"projection, many rows", dense(2500, {2, 1, 8, 8}, kProjection, false)}};
}

}  // namespace

std::string_view name_of(QkNormScope scope) {
  switch (scope) {
    case QkNormScope::head:
      return "head";
    case QkNormScope::projection:
      return "projection";
  }
  return "?";
}

ValueId qk_norm_rope(Builder& builder, const QkNormInputs& inputs,
                     const QkNormAttributes& attributes, const std::string& name) {
  return builder.emit(kQkNormRope, Attributes(attributes),
                      {inputs.qkv, inputs.gamma_q, inputs.gamma_k, inputs.table, inputs.squares},
                      name)[0];
}

ValueId qk_squares(Builder& builder, ValueId qkv, const QkNormAttributes& attributes,
                   const std::string& name) {
  return builder.emit(kQkSquares, Attributes(attributes), {qkv}, name)[0];
}

const OpSpec kQkNormRope{.name = "qk_norm_rope",
                         .infer = infer_qk_norm_rope,
                         .differentiate = differentiate_qk_norm_rope,
                         .cost = cost_qk_norm_rope,
                         .cpu = {.kernel = qk_norm_rope_cpu_kernel},
                         .cuda = choose_qk_norm<TROUPE_CUDA(qk_norm_rope_cuda_kernel)>,
                         .in_place = {.output = 0, .input = 0},
                         .print_attributes = print_qk_norm,
                         .samples = samples_qk_norm_rope};

const OpSpec kQkNormRopeGradient{
    .name = "qk_norm_rope_gradient",
    .infer = infer_qk_norm_rope_gradient,
    .cost = cost_qk_norm_rope_gradient,
    .cpu = {.kernel = qk_norm_rope_gradient_cpu_kernel, .scratch = scratch_qk_norm_rope_gradient},
    .cuda = choose_qk_norm<TROUPE_CUDA(qk_norm_rope_gradient_cuda_kernel)>,
    .in_place = {.output = 0, .input = 0},
    .print_attributes = print_qk_norm};

const OpSpec kQkNormRopeWeightGradient{.name = "qk_norm_rope_weight_gradient",
                                       .infer = infer_qk_norm_rope_weight_gradient,
                                       .cost = cost_qk_norm_rope_weight_gradient,
                                       .cpu = {.kernel = qk_norm_rope_weight_gradient_cpu_kernel,
                                               .workspace = workspace_qk_norm_rope_weight_gradient},
                                       .cuda = choose_qk_gain_gradient,
                                       .print_attributes = print_qk_norm_rope_weight_gradient};

const OpSpec kQkSquares{.name = "qk_squares",
                        .infer = infer_qk_squares,
                        .differentiate = differentiate_qk_squares,
                        .cost = cost_qk_squares,
                        .cpu = {.kernel = qk_squares_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(qk_squares_cuda_kernel)>,
                        .print_attributes = print_qk_norm};

const OpSpec kQkSquaresGradient{.name = "qk_squares_gradient",
                                .infer = infer_qk_squares_gradient,
                                .cost = cost_qk_squares_gradient,
                                .cpu = {.kernel = qk_squares_gradient_cpu_kernel},
                                .cuda = only_kernel<TROUPE_CUDA(qk_squares_gradient_cuda_kernel)>,
                                .print_attributes = print_qk_norm};

}  // namespace troupe
