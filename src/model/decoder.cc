#include "model/decoder.h"

#include <cmath>

#include "model/attention.h"
#include "model/feed_forward.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"

namespace troupe {

BatchValues declare_batch(Builder& builder, int32_t batch, int32_t sequence, bool with_labels,
                          DType accumulation) {
  const int64_t tokens = static_cast<int64_t>(batch) * sequence;
  BatchValues values;
  values.batch = batch;
  values.sequence = sequence;
  values.tokens = builder.input("tokens", DType::i32, {tokens});
  if (with_labels) {
    values.labels = builder.input("labels", DType::i32, {tokens});
    values.mask = builder.input("mask", accumulation, {tokens});
  }
  return values;
}

ValueId build_rope_table(Builder& builder, const ModelConfig& config, int32_t sequence,
                         DType dtype) {
  return rope_table(
      builder,
      {.positions = sequence, .rotary_dim = config.kv_channels, .base = config.rotary_base}, dtype,
      "rope_table");
}

ForwardResult build_forward(Builder& builder, const ModelConfig& config, const ModelState& state,
                            ValueId rope_table, const BatchValues& batch, bool training) {
  const auto parameter = [&](ParameterKind kind, int32_t layer = -1) {
    return builder.state(state.find(kind, layer));
  };
  const RmsNormAttributes norm{.epsilon = config.norm_epsilon, .zero_centered = false};
  ForwardResult result;

  // `residual` is the stream up to the last norm, `branch` what is still to be added to it.
  ValueId residual = embedding(builder, batch.tokens, parameter(ParameterKind::embedding), "x");
  ValueId branch;
  const auto add_and_norm = [&](ParameterKind kind, int32_t layer, const std::string& name) {
    const ValueId gamma = parameter(kind, layer);
    if (!branch.valid()) return rms_norm(builder, residual, gamma, norm, name).normalized;
    const RmsNormResult sum = add_rms_norm(builder, residual, branch, gamma, norm, name);
    residual = sum.sum;
    return sum.normalized;
  };

  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    builder.place.layer = static_cast<int16_t>(layer);
    const ValueId attention_input = add_and_norm(ParameterKind::input_norm, layer, "attention_in");
    branch = build_attention(builder, config, state, layer, rope_table, batch, attention_input);
    const ValueId ffn_input = add_and_norm(ParameterKind::post_attention_norm, layer, "ffn_in");
    branch = config.is_moe_layer(layer)
                 ? build_moe(builder, config, state, layer, ffn_input, training, result)
                 : build_dense_mlp(builder, state, layer, ffn_input);
  }
  builder.place.layer = -1;

  const ValueId final_state = add_and_norm(ParameterKind::final_norm, -1, "head_in");
  const ValueId head =
      config.tie_embeddings ? parameter(ParameterKind::embedding) : parameter(ParameterKind::head);
  result.logits = linear(builder, final_state, head, {}, "logits");
  if (batch.labels.valid()) {
    result.loss = cross_entropy(builder, result.logits, batch.labels, batch.mask, "loss").loss;
  }
  return result;
}

}  // namespace troupe
