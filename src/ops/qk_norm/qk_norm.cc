#include "ops/qk_norm/qk_norm.h"

#include <fmt/format.h>

#include "ops/add/add.h"
#include "ops/cpu/row_sums.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel qk_norm_cpu_kernel(const OpView& op);
CpuKernel qk_norm_gradient_cpu_kernel(const OpView& op);
CpuKernel qk_norm_weight_gradient_cpu_kernel(const OpView& op);
CpuKernel qk_squares_cpu_kernel(const OpView& op);
CpuKernel qk_squares_gradient_cpu_kernel(const OpView& op);
CudaKernel qk_norm_cuda_kernel(const OpView& op);
CudaKernel qk_norm_gradient_cuda_kernel(const OpView& op);
CudaKernel qk_norm_weight_gradient_cuda_kernel(const OpView& op);
CudaKernel qk_squares_cuda_kernel(const OpView& op);
CudaKernel qk_squares_gradient_cuda_kernel(const OpView& op);
uint64_t qk_norm_weight_gradient_cuda_scratch_bytes(const OpView& op);

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

void infer_qk_norm(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "qk_norm: takes qkv, gamma_q, gamma_k and squares");
  const auto& attributes = context.attributes<QkNormAttributes>();
  const Value qkv = context.input(0);
  TROUPE_CHECK(is_fused_projection(qkv, attributes),
               "qk_norm: qkv is not [T, (H + 2 G) d]: " + qkv.name + " " + qkv.shape.to_string());
  TROUPE_CHECK(are_qk_gains(context.input(1), context.input(2), qkv, attributes),
               "qk_norm: a gain has another shape or dtype than what it multiplies wants: " +
                   context.input(1).name + ", " + context.input(2).name);
  check_qk_squares(context, 3, qkv, attributes);
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
  context.output("rstd", accumulation_dtype(qkv.dtype),
                 {qkv.shape[0], normalized_vectors(attributes)}, qkv.rows);
}

void infer_qk_norm_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6,
               "qk_norm_gradient: takes dy, qkv, gamma_q, gamma_k, rstd and squares");
  const auto& attributes = context.attributes<QkNormAttributes>();
  const Value qkv = context.input(1);
  TROUPE_CHECK(is_fused_projection(qkv, attributes) && is_gradient_of(context.input(0), qkv) &&
                   are_qk_gains(context.input(2), context.input(3), qkv, attributes) &&
                   is_qk_statistic(context.input(4), qkv, attributes),
               "qk_norm_gradient: operands do not belong to " + qkv.name);
  check_qk_squares(context, 5, qkv, attributes);
  context.output("", qkv.dtype, qkv.shape, qkv.rows);
  if (!context.has_input(5)) return;
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

void infer_qk_norm_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "qk_norm_weight_gradient: takes dy, qkv, rstd and target");
  const auto& attributes = context.attributes<QkNormWeightGradientAttributes>();
  const Value qkv = context.input(1);
  const bool queries = attributes.first_head == 0 && attributes.head_count == attributes.heads;
  const bool keys =
      attributes.first_head == attributes.heads && attributes.head_count == attributes.groups;
  TROUPE_CHECK(is_fused_projection(qkv, attributes) && is_gradient_of(context.input(0), qkv) &&
                   is_qk_statistic(context.input(2), qkv, attributes) && (queries || keys),
               "qk_norm_weight_gradient: operands do not belong to " + qkv.name);
  const int64_t vector_heads = attributes.scope == QkNormScope::head ? 1 : attributes.head_count;
  declare_weight_gradient(context, 3, "", accumulation_dtype(qkv.dtype),
                          {vector_heads * attributes.head_dim});
}

void differentiate_qk_norm(DerivativeContext& context) {
  Builder& builder = context.builder();
  const auto attributes = context.attributes<QkNormAttributes>();
  const ValueId dy = context.output_gradient(0);
  const ValueId rstd = context.output(1);
  if (!dy.valid()) return;
  if (context.wants(0) || context.wants(3)) {
    const auto gradients = builder.emit(
        kQkNormGradient, Attributes(attributes),
        {dy, context.input(0), context.input(1), context.input(2), rstd, context.input(3)},
        "d_" + context.input_name(0));
    if (context.wants(0)) context.add_gradient(0, gradients[0]);
    if (context.wants(3)) context.add_gradient(3, gradients[1]);
  }
  for (const int gain : {1, 2}) {
    if (!context.wants(gain)) continue;
    const auto target = context.weight_target(gain);
    const QkNormWeightGradientAttributes weight_attributes{
        .heads = attributes.heads,
        .groups = attributes.groups,
        .head_dim = attributes.head_dim,
        .first_head = gain == 1 ? 0 : attributes.heads,
        .head_count = gain == 1 ? attributes.heads : attributes.groups,
        .scope = attributes.scope,
        .accumulate = target.accumulate};
    context.add_weight_gradient(gain,
                                builder.emit(kQkNormWeightGradient, Attributes(weight_attributes),
                                             {dy, context.input(0), rstd, target.target},
                                             "d_" + context.input_name(gain))[0]);
  }
}

double qk_norm_normalized_elements(const OpView& op) {
  const auto& attributes = op.attributes<QkNormAttributes>();
  return static_cast<double>(op.input(0).shape[0]) * (attributes.heads + attributes.groups) *
         attributes.head_dim;
}

Cost cost_qk_norm(const OpView& op) {
  return {.flops = 4 * qk_norm_normalized_elements(op),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(1).bytes() +
                                       op.input(2).bytes() + op.output(1).bytes())};
}

Cost cost_qk_norm_gradient(const OpView& op) {
  return {.flops = 8 * qk_norm_normalized_elements(op),
          .bytes = static_cast<double>(3 * op.input(0).bytes() + op.input(2).bytes() +
                                       op.input(3).bytes() + op.input(4).bytes())};
}

Cost cost_qk_norm_weight_gradient(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const auto rows = static_cast<double>(op.input(0).shape[0]);
  const double elements = rows * attributes.head_count * attributes.head_dim;
  const double vectors = rows * (attributes.scope == QkNormScope::head ? attributes.head_count : 1);
  return {.flops = 3 * elements,
          .bytes = 2 * elements * static_cast<double>(size_of(op.input(0).dtype)) +
                   vectors * static_cast<double>(size_of(op.input(2).dtype)) +
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

uint64_t workspace_qk_norm_weight_gradient(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const RowPieces pieces =
      row_pieces(op.input(0).shape[0], int64_t{attributes.head_count} * attributes.head_dim);
  return static_cast<uint64_t>(pieces.count) * op.output(0).bytes();
}

const char* qk_norm_scope_text(QkNormScope scope) {
  return scope == QkNormScope::head ? "" : " scope=projection";
}

std::string print_qk_norm(const Attributes& attributes) {
  const auto& values = attributes.as<QkNormAttributes>();
  return fmt::format("heads={} groups={} head_dim={} epsilon={}{}{}{}", values.heads, values.groups,
                     values.head_dim, values.epsilon, qk_norm_scope_text(values.scope),
                     values.zero_centered ? " zero_centered=1" : "",
                     values.ranks > 1 ? fmt::format(" ranks={}", values.ranks) : "");
}

std::string print_qk_norm_weight_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<QkNormWeightGradientAttributes>();
  return fmt::format("heads={} groups={} head_dim={} first_head={} head_count={} accumulate={}{}",
                     values.heads, values.groups, values.head_dim, values.first_head,
                     values.head_count, values.accumulate ? 1 : 0,
                     qk_norm_scope_text(values.scope));
}

std::vector<OpSample> samples_qk_norm() {
  const auto norm = [](SampleBuilder& sample, const QkNormAttributes& attributes, int64_t rows,
                       const SampleBuilder::Options& options) {
    const bool per_head = attributes.scope == QkNormScope::head;
    const int64_t d = attributes.head_dim;
    const ValueId qkv =
        sample.tensor("qkv", {rows, (attributes.heads + 2 * attributes.groups) * d}, options);
    const ValueId gamma_q =
        sample.tensor("gamma_q", {per_head ? d : attributes.heads * d}, {.accumulation = true});
    const ValueId gamma_k =
        sample.tensor("gamma_k", {per_head ? d : attributes.groups * d}, {.accumulation = true});
    sample.result(qk_norm(sample.builder(), {.qkv = qkv, .gamma_q = gamma_q, .gamma_k = gamma_k},
                          attributes, "y"));
  };
  // Squares of qkv itself, and those of others' heads besides.
  const auto with_squares = [](bool of_others, int32_t ranks, int64_t rows) {
    return [=](SampleBuilder& sample) {
      const QkNormAttributes attributes{.heads = 4,
                                        .groups = 2,
                                        .head_dim = 5,
                                        .epsilon = 0.01,
                                        .scope = QkNormScope::projection,
                                        .ranks = ranks};
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
                                .squares = squares};
      sample.result(qk_norm(sample.builder(), inputs, attributes, "y"));
    };
  };
  const auto dense = [=](int64_t rows, int32_t heads, int32_t groups, int32_t head_dim,
                         QkNormScope scope, bool differentiable) {
    return [=](SampleBuilder& sample) {
      norm(
          sample,
          {.heads = heads, .groups = groups, .head_dim = head_dim, .epsilon = 0.01, .scope = scope},
          rows, {.differentiable = differentiable});
    };
  };
  const auto zero_centered = [=](QkNormScope scope) {
    return [=](SampleBuilder& sample) {
      norm(sample,
           {.heads = 4,
            .groups = 2,
            .head_dim = 6,
            .epsilon = 0.01,
            .scope = scope,
            .zero_centered = true},
           3, {});
    };
  };
  const auto ragged = [=](QkNormScope scope, int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {1}, {live});
      norm(sample, {.heads = 2, .groups = 1, .head_dim = 4, .epsilon = 1e-6, .scope = scope}, 5,
           {.rows = rows});
    };
  };
  constexpr QkNormScope kHead = QkNormScope::head;
  constexpr QkNormScope kProjection = QkNormScope::projection;
  return {{"grouped", dense(3, 4, 2, 10, kHead, true)},
          {"one head each", dense(2, 1, 1, 17, kHead, true)},
          {"smallest", dense(1, 1, 1, 2, kHead, true)},
          {"ragged", ragged(kHead, 3)},
          {"many rows", dense(2500, 2, 1, 8, kHead, false)},
          {"zero centered", zero_centered(kHead)},
          {"projection, zero centered", zero_centered(kProjection)},
          {"projection, grouped", dense(3, 4, 2, 10, kProjection, true)},
          {"projection, one head each", dense(2, 1, 1, 17, kProjection, true)},
          {"projection, ragged", ragged(kProjection, 3)},
          {"projection, ragged without rows", ragged(kProjection, 0)},
          {"projection, own squares", with_squares(false, 1, 3)},
          {"projection, squares of others", with_squares(true, 3, 2)},
          {"projection, many rows", dense(2500, 2, 1, 8, kProjection, false)}};
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

ValueId qk_norm(Builder& builder, const QkNormInputs& inputs, const QkNormAttributes& attributes,
                const std::string& name) {
  return builder.emit(kQkNorm, Attributes(attributes),
                      {inputs.qkv, inputs.gamma_q, inputs.gamma_k, inputs.squares}, name)[0];
}

ValueId qk_squares(Builder& builder, ValueId qkv, const QkNormAttributes& attributes,
                   const std::string& name) {
  return builder.emit(kQkSquares, Attributes(attributes), {qkv}, name)[0];
}

const OpSpec kQkNorm{.name = "qk_norm",
                     .infer = infer_qk_norm,
                     .differentiate = differentiate_qk_norm,
                     .cost = cost_qk_norm,
                     .cpu_kernel = qk_norm_cpu_kernel,
                     .cuda_kernel = TROUPE_CUDA(qk_norm_cuda_kernel),
                     .print_attributes = print_qk_norm,
                     .samples = samples_qk_norm};

const OpSpec kQkNormGradient{.name = "qk_norm_gradient",
                             .infer = infer_qk_norm_gradient,
                             .cost = cost_qk_norm_gradient,
                             .cpu_kernel = qk_norm_gradient_cpu_kernel,
                             .cuda_kernel = TROUPE_CUDA(qk_norm_gradient_cuda_kernel),
                             .print_attributes = print_qk_norm};

const OpSpec kQkNormWeightGradient{
    .name = "qk_norm_weight_gradient",
    .infer = infer_qk_norm_weight_gradient,
    .cost = cost_qk_norm_weight_gradient,
    .cpu_kernel = qk_norm_weight_gradient_cpu_kernel,
    .cuda_kernel = TROUPE_CUDA(qk_norm_weight_gradient_cuda_kernel),
    .workspace_bytes = workspace_qk_norm_weight_gradient,
    .cuda_scratch_bytes = TROUPE_CUDA(qk_norm_weight_gradient_cuda_scratch_bytes),
    .print_attributes = print_qk_norm_weight_gradient};

const OpSpec kQkSquares{.name = "qk_squares",
                        .infer = infer_qk_squares,
                        .differentiate = differentiate_qk_squares,
                        .cost = cost_qk_squares,
                        .cpu_kernel = qk_squares_cpu_kernel,
                        .cuda_kernel = TROUPE_CUDA(qk_squares_cuda_kernel),
                        .print_attributes = print_qk_norm};

const OpSpec kQkSquaresGradient{.name = "qk_squares_gradient",
                                .infer = infer_qk_squares_gradient,
                                .cost = cost_qk_squares_gradient,
                                .cpu_kernel = qk_squares_gradient_cpu_kernel,
                                .cuda_kernel = TROUPE_CUDA(qk_squares_gradient_cuda_kernel),
                                .print_attributes = print_qk_norm};

}  // namespace troupe
