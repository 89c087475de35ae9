// A gated delta net (Yang et al., "Gated Delta Networks", 2024; Qwen3-Next), up to and including
// its output projection: attention of linear cost, whose memory is one matrix for each head.
//
//   q, k, v, z = x w_delta_in^T        of each key head: its query, its key, its values, their
//   gates b, a       = x w_delta_gates^T     of each key head: those of its value heads q, k, v =
//   silu(convolution of each column over the last rows, delta_conv) o          = gated delta
//   rule(q, k, v, sigma(b), -exp(delta_decay) softplus(a + delta_bias)) branch     = (norm(o)
//   silu(z)) w_delta_out^T, the norm that of each head
//
// (ops/attention/causal_conv, ops/attention/delta_gates, ops/attention/gated_delta_rule,
// ops/norms/gated_norm). Ranks of tp share the key heads. What those of cp do, which share the
// sequences, rows_of_delta_nets() says, whatever attention does.
#pragma once

#include "model/layer_block.h"
#include "program/module.h"

namespace troupe {

struct GatedDeltaNetSpec {
  int32_t hidden = 0;
  int32_t key_heads = 0;
  int32_t value_heads = 0;  // a multiple of key_heads
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  int32_t taps = 0;  // of the convolution
  double norm_epsilon = 0;

  int32_t values_of_key() const { return value_heads / key_heads; }
  int64_t key_size() const { return int64_t{key_heads} * key_dim; }
  int64_t value_size() const { return int64_t{value_heads} * value_dim; }
  int64_t conv_size() const { return 2 * key_size() + value_size(); }
};
// That of all layers of the configuration that have one.
GatedDeltaNetSpec delta_net_spec_of(const ModelConfig& config);

// The rows of each sequence that convolution and rule of this rank have; `key_heads` are those
// of all ranks. Where cp divides the key heads that tp leaves, rows are exchanged for heads before
// the convolution and back after the rule: in between a rank has whole sequences of its share of
// the heads. Otherwise it has its own chunks and all heads, and gets the rows and the state before
// each chunk (ops/attention/halo_rows, ops/attention/fold_delta_states).
SequenceChunks rows_of_delta_nets(int32_t key_heads, const ModelPart& part);

class GatedDeltaNet : public LayerBlock {
 public:
  GatedDeltaNet(ParameterList& parameters, const GatedDeltaNetSpec& spec, int32_t layer);

  ValueId build(const BlockContext& context, ValueId input) const override;
  void build_tables(Builder&, const ModelPart&, int32_t, DType, SharedTables&) const override {}
  double forward_flops(int64_t sequence) const override;
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

 private:
  ValueId build_core(const BlockContext& context, ValueId projected, ValueId gates) const;
  ValueId build_rule(const BlockContext& context, ValueId qkv, ValueId gates) const;

  const GatedDeltaNetSpec spec_;
  ParameterId w_in_;
  ParameterId w_gates_;
  ParameterId conv_;
  ParameterId decay_;
  ParameterId bias_;
  ParameterId norm_;
  ParameterId w_out_;
};

}  // namespace troupe
