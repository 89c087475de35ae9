#include "model/blocks/gqa_attention.h"

#include <algorithm>
#include <cmath>

#include "model/blocks/norm.h"
#include "model/layout_rules.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/attention/attention/attention.h"
#include "ops/elementwise/column_groups/column_groups.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/elementwise/sigmoid_gate/sigmoid_gate.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/products/linear/linear.h"

namespace troupe {

GqaSpec gqa_spec_of(const ModelConfig& config, int32_t layer) {
  return {.hidden = config.hidden_size,
          .heads = config.num_attention_heads,
          .groups = config.num_query_groups,
          .head_dim = config.kv_channels,
          .has_qk_norm = config.qk_layernorm,
          .qk_norm_scope = config.qk_norm_scope,
          .has_qk_l2_norm = config.qk_l2_norm,
          .norm_epsilon = config.norm_epsilon,
          .zero_centered_gamma = config.zero_centered_gamma,
          .has_qkv_bias = config.add_qkv_bias,
          .has_output_bias = config.add_bias_linear,
          .has_gate = config.attention_output_gate,
          .has_sinks = config.attention_sinks,
          .has_zero_sinks = config.zero_attention_sinks,
          .window = config.has_window(layer) ? config.sliding_window : 0,
          .rotary_base = config.rotary_base,
          .rope_scaling = config.rope_scaling(),
          .rotary_dim = config.rotary_dim(),
          .dropout = config.attention_dropout};
}

GqaAttention::GqaAttention(ParameterList& parameters, const GqaSpec& spec, int32_t layer)
    : LayerBlock(layer), spec_(spec) {
  const int64_t queries = spec.query_size();
  const int64_t keys = spec.key_size();
  const CutSection query_rows{.size = queries, .units = spec.heads};
  const CutSection projected{.size = (spec.has_gate ? 2 : 1) * queries, .units = spec.heads};
  const CutSection key_rows{.size = keys, .units = spec.groups, .is_shared = true};
  const Cut heads{.dimension = 0, .sections = {projected, key_rows, key_rows}};
  w_qkv_ = parameters.weight("w_qkv", {projected.size + 2 * keys, spec.hidden},
                             {.cuts = {heads}, .products = ProductGroup::attention});
  parameters.at(w_qkv_).is_fused = true;
  if (spec.has_qkv_bias) {
    b_qkv_ = parameters.bias("b_qkv", {queries + 2 * keys}, {.cuts = {heads}});
  }
  if (spec.has_qk_norm) {
    const auto gain = [&](const char* name, const CutSection& rows) {
      const bool is_whole = spec.qk_norm_scope == QkNormScope::projection;
      const ParameterId id =
          is_whole
              ? parameters.gain(name, rows.size, {.cuts = {{.sections = {rows}}}})
              : parameters.gain(name, spec.head_dim, {.gradient_class = GradientClass::head_norm});
      parameters.at(id).is_qk_norm = true;
      return id;
    };
    q_norm_ = gain("q_norm", query_rows);
    k_norm_ = gain("k_norm", {.size = keys, .units = spec.groups});
  }
  if (spec.has_sinks) {
    sinks_ = parameters.shift(
        "sinks", spec.heads, {.cuts = {{.sections = {{.size = spec.heads, .units = spec.heads}}}}});
  }
  w_out_ = parameters.weight(
      "w_attention_out", {spec.hidden, queries},
      {.cuts = {{.dimension = 1, .sections = {query_rows}, .what = "the size of all query heads"}},
       .is_into_stream = true,
       .products = ProductGroup::attention});
  if (spec.has_output_bias) {
    b_out_ = parameters.bias("b_attention_out", {spec.hidden},
                             {.gradient_class = GradientClass::replicated});
  }
}

GqaAttention::Heads GqaAttention::heads_of_rank(int32_t ranks) const {
  return {.queries = spec_.heads / ranks, .groups = std::max(1, spec_.groups / ranks)};
}

RopeTableAttributes GqaAttention::table(const ModelPart& part, int32_t rows) const {
  return {.positions = rows,
          .rotary_dim = spec_.rotary_dim,
          .base = spec_.rotary_base,
          .scaling = spec_.rope_scaling,
          .chunks = chunks_of(part)};
}

void GqaAttention::build_tables(Builder& builder, const ModelPart& part, int32_t rows, DType dtype,
                                SharedTables& tables) const {
  tables.rope(builder, table(part, rows), dtype);
}

ValueId GqaAttention::build(const BlockContext& context, ValueId input) const {
  Builder& builder = context.builder;
  const TensorParallel tensor_parallel(builder, context.part());
  // Of the norm that made them: where it is recomputed, the rows of all ranks are, too.
  builder.place.module = &kInputNormModule;
  const ValueId rows = tensor_parallel.enter(input, "attention_in_all");
  builder.place.module = &kQkvModule;
  const ValueId qkv =
      linear(builder, rows, context.parameter(w_qkv_), {.bias = context.parameter(b_qkv_)}, "qkv");
  builder.place.module = &kAttentionModule;
  const ValueId attended =
      spec_.has_gate ? build_gated(context, qkv) : build_attended(context, qkv);
  builder.place.module = &kAttentionOutModule;
  return leave_linear(builder, tensor_parallel, attended, context.parameter(w_out_),
                      context.parameter(b_out_), "attention_out");
}

ValueId GqaAttention::build_attended(const BlockContext& context, ValueId qkv) const {
  const ValueId rotated = build_rotated(context, qkv);
  context.builder.place.module = &kCoreAttentionModule;
  return build_core(context, rotated);
}

ValueId GqaAttention::build_gated(const BlockContext& context, ValueId projected) const {
  Builder& builder = context.builder;
  const Heads heads = heads_of_rank(TensorParallel(builder, context.part()).ranks());
  const auto [qkv, gate] = split_column_groups(builder, projected,
                                               {.groups = heads.queries,
                                                .widths = {spec_.head_dim, spec_.head_dim},
                                                .first = 1,
                                                .tail = 2 * heads.groups * spec_.head_dim},
                                               "qkv_apart");
  const ValueId attended = build_attended(context, qkv);
  builder.place.module = &kAttentionModule;
  return sigmoid_gate(builder, attended, gate, "gated_context");
}

ValueId GqaAttention::build_rotated(const BlockContext& context, ValueId qkv) const {
  Builder& builder = context.builder;
  const TensorParallel tensor_parallel(builder, context.part());
  const Heads heads = heads_of_rank(tensor_parallel.ranks());
  const DType wide = accumulation_dtype(context.state.dtype);
  const ValueId rope_table =
      context.tables.rope(builder, table(context.part(), context.batch.sequence), wide);
  if (!spec_.has_qk_norm && !spec_.has_qk_l2_norm) {
    return rope(builder, qkv, rope_table,
                {.heads = heads.queries,
                 .groups = heads.groups,
                 .head_dim = spec_.head_dim,
                 .rotary_dim = spec_.rotary_dim,
                 .sequence = context.batch.sequence,
                 .inverse = false},
                "qkv_rotated");
  }
  QkNormAttributes norm{.heads = heads.queries,
                        .groups = heads.groups,
                        .head_dim = spec_.head_dim,
                        .epsilon = spec_.norm_epsilon};
  QkNormInputs inputs{.qkv = qkv, .gamma_q = {}, .gamma_k = {}, .table = rope_table};
  if (spec_.has_qk_norm) {
    norm.scope = spec_.qk_norm_scope;
    norm.zero_centered = spec_.zero_centered_gamma;
    inputs.gamma_q = context.parameter(q_norm_);
    inputs.gamma_k = context.parameter(k_norm_);
  } else {
    inputs.gamma_q = inputs.gamma_k = fill(builder, 1, wide, {spec_.head_dim}, "ones");
  }
  if (spec_.has_qk_norm && spec_.qk_norm_scope == QkNormScope::projection &&
      tensor_parallel.ranks() > 1) {
    norm.ranks = tensor_parallel.ranks();
    const ValueId own = qk_squares(builder, qkv, norm, "qk_squares_here");
    inputs.squares = tensor_parallel.sum_for_all(own, "qk_squares");
  }
  norm.rotary_dim = spec_.rotary_dim;
  norm.sequence = context.batch.sequence;
  return qk_norm_rope(builder, inputs, norm, "qkv_rotated");
}

ValueId GqaAttention::build_core(const BlockContext& context, ValueId rotated) const {
  const TensorParallel tensor_parallel(context.builder, context.part());
  const Heads heads = heads_of_rank(tensor_parallel.ranks());
  const double dropped = context.options.training ? spec_.dropout : 0;
  ValueId sinks = context.parameter(sinks_);
  if (spec_.has_zero_sinks) {
    const DType wide = accumulation_dtype(context.state.dtype);
    sinks = fill(context.builder, 0, wide, {heads.queries}, "zero_sinks");
  }
  return attend_over_context(context.builder, context.part(), context.options.context_exchange,
                             {rotated, rotated},
                             {.step = dropped > 0 ? context.options.step : ValueId{},
                              .starts = context.batch.starts,
                              .sinks = sinks},
                             {.batch = context.batch.batch,
                              .sequence = context.batch.sequence,
                              .heads = heads.queries,
                              .groups = heads.groups,
                              .head_dim = spec_.head_dim,
                              .scale = 1.0 / std::sqrt(static_cast<double>(spec_.head_dim)),
                              .window = spec_.window,
                              .substream = substream(context, RandomPlace::attention_dropout),
                              .seed = context.options.seed,
                              .probability = dropped,
                              .first_head = tensor_parallel.rank() * heads.queries,
                              .all_heads = tensor_parallel.ranks() > 1 ? spec_.heads : 0},
                             "context");
}

double GqaAttention::forward_flops(int64_t sequence) const {
  const double hidden = spec_.hidden;
  const auto queries = static_cast<double>(spec_.query_size());
  const auto keys = static_cast<double>(spec_.key_size());
  const double projections = 2 * hidden * ((spec_.has_gate ? 3 : 2) * queries + 2 * keys);
  return projections + 2 * static_cast<double>(sequence) * queries;  // half of two products
}

std::optional<Refusal> GqaAttention::check_layout(const Layout& layout,
                                                  ContextExchange exchange) const {
  if (auto refusal = check_heads(layout)) return refusal;
  if (exchange != ContextExchange::a2a) return std::nullopt;
  return check_exchange(layout);
}

std::optional<Refusal> GqaAttention::check_heads(const Layout& layout) const {
  const int32_t tp = layout.tp();
  const int32_t groups = spec_.groups;
  const auto valid = [&](int64_t size) {
    return spec_.heads % size == 0 && (groups % size == 0 || size % groups == 0);
  };
  if (!valid(tp)) {
    return refuse_size(Setting::tensor_parallel, tp,
                       fmt::format("it must divide the model's {} query heads, and divide its {} "
                                   "key-value heads or be a multiple of them",
                                   spec_.heads, groups),
                       nearest_values(tp, spec_.heads, valid));
  }
  const bool norms_all = spec_.has_qk_norm && spec_.qk_norm_scope == QkNormScope::projection;
  if (!norms_all || groups % tp == 0) return std::nullopt;
  return refuse_size(
      Setting::tensor_parallel, tp,
      fmt::format("the norm of all keys together needs it to divide the {} key-value heads",
                  groups),
      nearest_values(tp, spec_.heads,
                     [&](int64_t size) { return valid(size) && groups % size == 0; }));
}

// Each rank of cp attends with its share of the heads that TP leaves.
std::optional<Refusal> GqaAttention::check_exchange(const Layout& layout) const {
  const int32_t cp = layout.cp();
  const Heads heads = heads_of_rank(layout.tp());
  const auto valid = [&](int64_t size) {
    return heads.queries % size == 0 && heads.groups % size == 0;
  };
  if (valid(cp)) return std::nullopt;
  const std::vector<int64_t> nearest = nearest_values(cp, heads.groups, valid);
  return Refusal{
      .setting = Setting::context_parallel,
      .message = {Setting::context_parallel, fmt::format(" {}: with ", cp),
                  Setting::context_exchange,
                  fmt::format(" a2a it must divide the {} query heads and {} key-value heads that ",
                              heads.queries, heads.groups),
                  Setting::tensor_parallel,
                  fmt::format(" {} leaves to a rank; p2p and allgather have no such rule. Nearest: "
                              "{}.",
                              layout.tp(), text_of_values(nearest))},
      .nearest = nearest};
}

}  // namespace troupe
