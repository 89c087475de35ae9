// Grouped-query attention with rotary positions, up to and including its output projection; norms
// of queries and keys, a sliding window and biases by choice.
//
//   q, k, v = x w_qkv^T + b_qkv           heads of queries, then of keys, then of values
//   q, k    = rope(norm(q)), rope(norm(k))
//   branch  = attention(q, k, v) w_attention_out^T + b_attention_out
//
// With a gate each head's rows of w_qkv are its queries and then its gate g, and
//   branch  = (attention(q, k, v) sigma(g)) w_attention_out^T
//
// Parameters: w_qkv [(heads + 2 groups) d, hidden], b_qkv, q_norm and k_norm ([d] or, over the
// whole projection, [heads d] and [groups d]), sinks [heads] (ops/attention/attention_sinks),
// w_attention_out [hidden, heads d], b_attention_out. Ranks of tp share the heads; key and value
// heads that are fewer than these ranks are held by several.
#pragma once

#include "model/layer_block.h"
#include "program/module.h"

namespace troupe {

// All of attention but the next three.
inline constexpr ModuleSpec kAttentionModule{.products = ProductGroup::attention};
// The product that makes queries, keys and values.
inline constexpr ModuleSpec kQkvModule{.offload = "qkv_linear",
                                       .products = ProductGroup::attention};
// Scores, softmax, and the weighted sum of values.
inline constexpr ModuleSpec kCoreAttentionModule{.recompute = "core_attn", .offload = "core_attn"};
// The product after it.
inline constexpr ModuleSpec kAttentionOutModule{.offload = "attn_proj",
                                                .products = ProductGroup::attention};

struct GqaSpec {
  int32_t hidden = 0;
  int32_t heads = 0;
  int32_t groups = 0;  // key-value heads
  int32_t head_dim = 0;
  bool has_qk_norm = false;  // RMS norm of queries and keys, before RoPE
  QkNormScope qk_norm_scope = QkNormScope::head;
  bool has_qk_l2_norm = false;  // the same without gains
  double norm_epsilon = 0;
  bool zero_centered_gamma = false;
  bool has_qkv_bias = false;
  bool has_output_bias = false;
  bool has_gate = false;        // on the results of heads
  bool has_sinks = false;       // a learned score of each head that no key has
  bool has_zero_sinks = false;  // such scores, which stay 0: softmax plus one in the denominator
  int32_t window = 0;           // keys visible to a query, itself included; 0: all before it
  double rotary_base = 10000;
  RopeScaling rope_scaling = {};
  int32_t rotary_dim = 0;  // of each head: the first elements turn
  double dropout = 0;      // of attention probabilities, in training

  int64_t query_size() const { return int64_t{heads} * head_dim; }
  int64_t key_size() const { return int64_t{groups} * head_dim; }
};
GqaSpec gqa_spec_of(const ModelConfig& config, int32_t layer);

class GqaAttention : public LayerBlock {
 public:
  GqaAttention(ParameterList& parameters, const GqaSpec& spec, int32_t layer);

  ValueId build(const BlockContext& context, ValueId input) const override;
  void build_tables(Builder& builder, const ModelPart& part, int32_t rows, DType dtype,
                    SharedTables& tables) const override;
  double forward_flops(int64_t sequence) const override;
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

 private:
  // The heads of one rank.
  struct Heads {
    int32_t queries;
    int32_t groups;
  };
  Heads heads_of_rank(int32_t ranks) const;
  RopeTableAttributes table(const ModelPart& part, int32_t rows) const;
  ValueId build_rotated(const BlockContext& context, ValueId qkv) const;
  ValueId build_attended(const BlockContext& context, ValueId qkv) const;
  ValueId build_gated(const BlockContext& context, ValueId projected) const;
  ValueId build_core(const BlockContext& context, ValueId rotated) const;
  std::optional<Refusal> check_heads(const Layout& layout) const;
  std::optional<Refusal> check_exchange(const Layout& layout) const;

  const GqaSpec spec_;
  ParameterId w_qkv_;
  ParameterId b_qkv_;
  ParameterId q_norm_;
  ParameterId k_norm_;
  ParameterId sinks_;
  ParameterId w_out_;
  ParameterId b_out_;
};

}  // namespace troupe
