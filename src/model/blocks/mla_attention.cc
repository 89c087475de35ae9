#include "model/blocks/mla_attention.h"

#include <cmath>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/norm.h"
#include "model/layout_rules.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/attention/attention/attention.h"
#include "ops/attention/mla_keys/mla_keys.h"
#include "ops/attention/rope/rope.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/products/linear/linear.h"

namespace troupe {

MlaSpec mla_spec_of(const ModelConfig& config) {
  const int32_t key_dim = config.qk_head_dim + config.qk_pos_emb_head_dim;
  const double epsilon = config.latent_norm_epsilon;
  return {.hidden = config.hidden_size,
          .heads = config.num_attention_heads,
          .query_latent = config.q_lora_rank,
          .key_latent = config.kv_lora_rank,
          .plain_dim = config.qk_head_dim,
          .rotary_dim = config.qk_pos_emb_head_dim,
          .value_dim = config.v_head_dim,
          .has_latent_norms = config.qk_layernorm,
          .norm_epsilon = epsilon > 0 ? epsilon : config.norm_epsilon,
          .zero_centered_gamma = config.zero_centered_gamma,
          .rotary_base = config.rotary_base,
          .rope_scaling = config.rope_scaling(),
          .rotary_interleaved = config.rotary_interleaved,
          .scale = config.rope_score_factor() / std::sqrt(static_cast<double>(key_dim)),
          .dropout = config.attention_dropout};
}

MlaAttention::MlaAttention(ParameterList& parameters, const MlaSpec& spec, int32_t layer)
    : LayerBlock(layer), spec_(spec) {
  const auto heads = [&](int dimension, int64_t size) {
    return Cut{.dimension = dimension,
               .sections = {{.size = size, .units = spec.heads}},
               .what = "the size of all heads"};
  };
  const ParameterList::Options everywhere{.gradient_class = GradientClass::replicated};
  const auto norm = [&](const char* name, int64_t size) {
    if (!spec.has_latent_norms) return ParameterId();
    const ParameterId id = parameters.gain(name, size, everywhere);
    parameters.at(id).is_qk_norm = true;
    return id;
  };
  // Of a projection that is cut, or whole everywhere.
  const auto cut = [](const Cut& cut) {
    return ParameterList::Options{.cuts = {cut}, .products = ProductGroup::attention};
  };
  const ParameterList::Options whole{.gradient_class = GradientClass::replicated,
                                     .products = ProductGroup::attention};
  const Cut query_rows = heads(0, spec.query_size());
  if (spec.query_latent == 0) {
    w_q_ = parameters.weight("w_q", {spec.query_size(), spec.hidden}, cut(query_rows));
  } else {
    w_q_down_ = parameters.weight("w_q_down", {spec.query_latent, spec.hidden}, whole);
    q_norm_ = norm("q_latent_norm", spec.query_latent);
    w_q_up_ = parameters.weight("w_q_up", {spec.query_size(), spec.query_latent}, cut(query_rows));
  }
  w_kv_down_ =
      parameters.weight("w_kv_down", {spec.key_latent + spec.rotary_dim, spec.hidden}, whole);
  kv_norm_ = norm("kv_latent_norm", spec.key_latent);
  w_kv_up_ = parameters.weight("w_kv_up", {spec.key_value_size(), spec.key_latent},
                               cut(heads(0, spec.key_value_size())));
  w_out_ = parameters.weight("w_attention_out", {spec.hidden, spec.value_size()},
                             {.cuts = {heads(1, spec.value_size())},
                              .is_into_stream = true,
                              .products = ProductGroup::attention});
}

RopeTableAttributes MlaAttention::table(const ModelPart& part, int32_t rows) const {
  return {.positions = rows,
          .rotary_dim = spec_.rotary_dim,
          .base = spec_.rotary_base,
          .scaling = spec_.rope_scaling,
          .chunks = chunks_of(part)};
}

void MlaAttention::build_tables(Builder& builder, const ModelPart& part, int32_t rows, DType dtype,
                                SharedTables& tables) const {
  tables.rope(builder, table(part, rows), dtype);
}

ValueId MlaAttention::build(const BlockContext& context, ValueId input) const {
  const AttentionHeads heads = build_heads(context, input);
  context.builder.place.module = &kCoreAttentionModule;
  return build_out(context, build_core(context, heads));
}

ValueId MlaAttention::build_out(const BlockContext& context, ValueId attended) const {
  context.builder.place.module = &kAttentionOutModule;
  return leave_linear(context.builder, TensorParallel(context.builder, context.part()), attended,
                      context.parameter(w_out_), {}, "attention_out");
}

ValueId MlaAttention::build_latent_norm(const BlockContext& context, ValueId latent,
                                        ParameterId gain, const std::string& name) const {
  if (!gain.valid()) return latent;
  return rms_norm(context.builder, latent, context.parameter(gain),
                  {.epsilon = spec_.norm_epsilon, .zero_centered = spec_.zero_centered_gamma}, name)
      .normalized;
}

MlaAttention::Latents MlaAttention::build_latents(const BlockContext& context,
                                                  ValueId input) const {
  Builder& builder = context.builder;
  const TensorParallel tensor_parallel(builder, context.part());
  Latents latents;
  if (spec_.query_latent == 0) {
    // Of the norm that made them: where it is recomputed, the rows of all ranks are, too.
    builder.place.module = &kInputNormModule;
    latents.query = tensor_parallel.enter(input, "attention_in_all");
  } else {
    builder.place.module = &kMlaLatentModule;
    const ValueId latent = linear(builder, input, context.parameter(w_q_down_), {}, "query_latent");
    latents.query = tensor_parallel.enter(
        build_latent_norm(context, latent, q_norm_, "query_latent_normed"), "query_latent_all");
  }
  builder.place.module = &kMlaLatentModule;
  const SplitColumnsResult keys =
      split_columns(builder, linear(builder, input, context.parameter(w_kv_down_), {}, "kv_down"),
                    {.columns = spec_.key_latent}, "kv_latent");
  latents.key = tensor_parallel.enter(
      build_latent_norm(context, keys.first, kv_norm_, "kv_latent_normed"), "kv_latent_all");
  latents.shared_key = tensor_parallel.enter(keys.rest, "shared_key_all");
  return latents;
}

ValueId MlaAttention::build_queries(const BlockContext& context, const Latents& latents) const {
  const ParameterId weight = spec_.query_latent == 0 ? w_q_ : w_q_up_;
  return linear(context.builder, latents.query, context.parameter(weight), {}, "queries");
}

ValueId MlaAttention::rope_table_of(const BlockContext& context) const {
  return context.tables.rope(context.builder, table(context.part(), context.batch.sequence),
                             accumulation_dtype(context.state.dtype));
}

AttentionHeads MlaAttention::build_heads(const BlockContext& context, ValueId input) const {
  Builder& builder = context.builder;
  const Latents latents = build_latents(context, input);
  builder.place.module = &kMlaUpProjectionModule;
  const ValueId rope_table = rope_table_of(context);
  const int32_t heads = spec_.heads / TensorParallel(builder, context.part()).ranks();
  const ValueId queries = rope(builder, build_queries(context, latents), rope_table,
                               {.heads = heads,
                                .head_dim = spec_.key_dim(),
                                .rotary_dim = spec_.rotary_dim,
                                .first = spec_.plain_dim,
                                .interleaved = spec_.rotary_interleaved,
                                .sequence = context.batch.sequence},
                               "queries_rotated");
  const ValueId projected =
      linear(builder, latents.key, context.parameter(w_kv_up_), {}, "keys_and_values");
  const ValueId keys = mla_keys(
      builder, {.key_values = projected, .shared_key = latents.shared_key, .table = rope_table},
      {.heads = heads,
       .plain_dim = spec_.plain_dim,
       .rotary_dim = spec_.rotary_dim,
       .value_dim = spec_.value_dim,
       .sequence = context.batch.sequence,
       .interleaved = spec_.rotary_interleaved},
      "key_rows");
  return {.queries = queries, .keys = keys};
}

ValueId MlaAttention::build_core(const BlockContext& context, const AttentionHeads& rows) const {
  const TensorParallel tensor_parallel(context.builder, context.part());
  const int32_t heads = spec_.heads / tensor_parallel.ranks();
  const double dropped = context.options.training ? spec_.dropout : 0;
  return attend_over_context(
      context.builder, context.part(), context.options.context_exchange, rows,
      {.step = dropped > 0 ? context.options.step : ValueId{}, .starts = context.batch.starts},
      {.batch = context.batch.batch,
       .sequence = context.batch.sequence,
       .heads = heads,
       .groups = heads,
       .head_dim = spec_.key_dim(),
       .value_dim = spec_.value_dim,
       .scale = spec_.scale,
       .substream = substream(context, RandomPlace::attention_dropout),
       .seed = context.options.seed,
       .probability = dropped,
       .first_head = tensor_parallel.rank() * heads,
       .all_heads = tensor_parallel.ranks() > 1 ? spec_.heads : 0},
      "context");
}

double MlaAttention::projection_flops() const {
  const double hidden = spec_.hidden;
  const auto queries = static_cast<double>(spec_.query_size());
  const auto values = static_cast<double>(spec_.value_size());
  const double of_queries =
      spec_.query_latent == 0 ? hidden * queries : spec_.query_latent * (hidden + queries);
  const double of_keys =
      hidden * (spec_.key_latent + spec_.rotary_dim) +
      static_cast<double>(spec_.key_latent) * static_cast<double>(spec_.key_value_size());
  return 2 * (of_queries + of_keys + values * hidden);
}

double MlaAttention::forward_flops(int64_t sequence) const {
  const auto pairs = static_cast<double>(sequence);  // half of two products
  return projection_flops() + pairs * static_cast<double>(spec_.query_size() + spec_.value_size());
}

std::optional<Refusal> MlaAttention::check_layout(const Layout& layout,
                                                  ContextExchange exchange) const {
  if (auto refusal = require_divisor(Setting::tensor_parallel, layout.tp(), spec_.heads,
                                     "the model's attention heads")) {
    return refusal;
  }
  if (exchange != ContextExchange::a2a) return std::nullopt;
  return require_divisor(Setting::context_parallel, layout.cp(), spec_.heads / layout.tp(),
                         "the attention heads of a rank (p2p and allgather have no such rule)");
}

}  // namespace troupe
