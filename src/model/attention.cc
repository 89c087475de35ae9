#include "model/attention.h"

#include <cmath>

#include "ops/attention/attention.h"
#include "ops/linear/linear.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/rope/rope.h"

namespace troupe {

ValueId build_attention(Builder& builder, const ModelConfig& config, const ModelState& state,
                        int32_t layer, ValueId rope_table, const BatchValues& batch,
                        ValueId input) {
  const auto parameter = [&](ParameterKind kind) { return builder.state(state.find(kind, layer)); };
  const int32_t heads = config.num_attention_heads;
  const int32_t groups = config.num_query_groups;
  const int32_t head_dim = config.kv_channels;

  ValueId qkv = linear(builder, input, parameter(ParameterKind::w_qkv), {}, "qkv");
  if (config.qk_layernorm) {
    qkv = qk_norm(
        builder, qkv, parameter(ParameterKind::q_norm), parameter(ParameterKind::k_norm),
        {.heads = heads, .groups = groups, .head_dim = head_dim, .epsilon = config.norm_epsilon},
        "qkv_normed");
  }
  qkv = rope(builder, qkv, rope_table,
             {.heads = heads,
              .groups = groups,
              .head_dim = head_dim,
              .rotary_dim = head_dim,
              .sequence = batch.sequence,
              .inverse = false},
             "qkv_rotated");
  const ValueId context = attention(builder, qkv, {},
                                    {.batch = batch.batch,
                                     .sequence = batch.sequence,
                                     .heads = heads,
                                     .groups = groups,
                                     .head_dim = head_dim,
                                     .scale = 1.0 / std::sqrt(static_cast<double>(head_dim)),
                                     .window = config.sliding_window},
                                    "context");
  return linear(builder, context, parameter(ParameterKind::w_attention_out), {}, "attention_out");
}

}  // namespace troupe
