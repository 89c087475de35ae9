#include "model/attention.h"

#include <algorithm>
#include <cmath>

#include "model/context_parallel.h"
#include "model/random_place.h"
#include "model/read_parameter.h"
#include "model/tensor_parallel.h"
#include "ops/attention/attention.h"
#include "ops/fill/fill.h"
#include "ops/linear/linear.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/rope/rope.h"

namespace troupe {

ValueId build_attention(Builder& builder, const ModelConfig& config, const ModelState& state,
                        int32_t layer, ValueId rope_table, const BatchValues& batch, ValueId input,
                        const ForwardOptions& options) {
  const auto parameter = [&](ParameterKind kind) {
    return read_parameter(builder, state, kind, layer);
  };
  const auto bias = [&](bool wanted, ParameterKind kind) {
    return wanted ? parameter(kind) : ValueId{};
  };
  const TensorParallel tensor_parallel(builder, state.part);
  const int32_t heads = config.num_attention_heads / tensor_parallel.ranks();
  const int32_t groups = std::max(1, config.num_query_groups / tensor_parallel.ranks());
  const int32_t head_dim = config.kv_channels;

  // Of the norm that made them: where it is recomputed, the rows of all ranks are, too.
  builder.place.module = Module::attention_norm;
  const ValueId rows = tensor_parallel.enter(input, "attention_in_all");
  builder.place.module = Module::qkv;
  const ValueId qkv = linear(builder, rows, parameter(ParameterKind::w_qkv),
                             {.bias = bias(config.add_qkv_bias, ParameterKind::b_qkv)}, "qkv");
  builder.place.module = Module::attention;
  ValueId rotated;
  if (config.qk_layernorm || config.qk_l2_norm) {
    QkNormAttributes norm{
        .heads = heads, .groups = groups, .head_dim = head_dim, .epsilon = config.norm_epsilon};
    QkNormInputs inputs{.qkv = qkv, .gamma_q = {}, .gamma_k = {}, .table = rope_table};
    if (config.qk_layernorm) {
      norm.scope = config.qk_norm_scope;
      norm.zero_centered = config.zero_centered_gamma;
      inputs.gamma_q = parameter(ParameterKind::q_norm);
      inputs.gamma_k = parameter(ParameterKind::k_norm);
    } else {
      inputs.gamma_q = inputs.gamma_k =
          fill(builder, 1, builder.value(rope_table).dtype, {head_dim}, "ones");
    }
    if (config.qk_layernorm && config.qk_norm_scope == QkNormScope::projection &&
        tensor_parallel.ranks() > 1) {
      norm.ranks = tensor_parallel.ranks();
      const ValueId own = qk_squares(builder, qkv, norm, "qk_squares_here");
      inputs.squares = tensor_parallel.sum_for_all(own, "qk_squares");
    }
    norm.rotary_dim = head_dim;
    norm.sequence = batch.sequence;
    rotated = qk_norm_rope(builder, inputs, norm, "qkv_rotated");
  } else {
    rotated = rope(builder, qkv, rope_table,
                   {.heads = heads,
                    .groups = groups,
                    .head_dim = head_dim,
                    .rotary_dim = head_dim,
                    .sequence = batch.sequence,
                    .inverse = false},
                   "qkv_rotated");
  }
  builder.place.module = Module::core_attention;
  const double dropped = options.training ? config.attention_dropout : 0;
  const ValueId context = attend_over_context(
      builder, state.part, options.context_exchange, rotated,
      dropped > 0 ? options.step : ValueId{},
      {.batch = batch.batch,
       .sequence = batch.sequence,
       .heads = heads,
       .groups = groups,
       .head_dim = head_dim,
       .scale = 1.0 / std::sqrt(static_cast<double>(head_dim)),
       .window = config.sliding_window,
       .substream = random_substream(RandomPlace::attention_dropout, layer, options.micro_batch),
       .seed = options.seed,
       .probability = dropped,
       .first_head = tensor_parallel.rank() * heads,
       .all_heads = tensor_parallel.ranks() > 1 ? config.num_attention_heads : 0},
      "context");
  builder.place.module = Module::attention_out;
  return leave_linear(builder, tensor_parallel, context, parameter(ParameterKind::w_attention_out),
                      bias(config.add_bias_linear, ParameterKind::b_attention_out),
                      "attention_out");
}

}  // namespace troupe
