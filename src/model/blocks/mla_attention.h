// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), up to and including its output
// projection: queries, keys and values are made of latents that are much smaller than they.
//
//   q = x w_q^T, or q = norm(x w_q_down^T) w_q_up^T        heads of n + r elements
//   c, k_r = x w_kv_down^T                                 a latent; r elements for all heads
//   kv = norm(c) w_kv_up^T                                 heads of n elements of k, then v
//   q = (q_n, rope(q_r)),  k = (k_n, rope(k_r))
//   branch = attention(q, k, v) w_attention_out^T
//
// The latents are the same on all ranks of tp, which share the heads: with sequence parallelism
// each rank makes those of its rows, and they are exchanged instead of the wider input. Only where
// there is no latent of the queries is the input exchanged, too.
#pragma once

#include "model/layer_block.h"
#include "ops/attention/attention/attention.h"
#include "program/module.h"

namespace troupe {

// The latents: all products that read the input, and norms.
inline constexpr ModuleSpec kMlaLatentModule{.offload = "qkv_linear",
                                             .products = ProductGroup::attention};
// The products that make queries, keys and values of the latents, and the rows of keys and values
// put together of these: what attention keeps is made again of the latents.
inline constexpr ModuleSpec kMlaUpProjectionModule{
    .recompute = "mla_up_proj", .products = ProductGroup::attention, .discards_outputs = true};

struct MlaSpec {
  int32_t hidden = 0;
  int32_t heads = 0;
  int32_t query_latent = 0;  // size; 0: none
  int32_t key_latent = 0;
  int32_t plain_dim = 0;   // n
  int32_t rotary_dim = 0;  // r
  int32_t value_dim = 0;
  bool has_latent_norms = true;
  double norm_epsilon = 0;
  bool zero_centered_gamma = false;
  double rotary_base = 10000;
  RopeScaling rope_scaling = {};
  bool rotary_interleaved = false;
  double scale = 1;    // of scores
  double dropout = 0;  // of attention probabilities, in training

  int32_t key_dim() const { return plain_dim + rotary_dim; }
  int64_t query_size() const { return int64_t{heads} * key_dim(); }
  int64_t key_value_size() const { return int64_t{heads} * (plain_dim + value_dim); }
  int64_t value_size() const { return int64_t{heads} * value_dim; }
};
// That of all layers of the configuration.
MlaSpec mla_spec_of(const ModelConfig& config);

class MlaAttention : public LayerBlock {
 public:
  MlaAttention(ParameterList& parameters, const MlaSpec& spec, int32_t layer);

  ValueId build(const BlockContext& context, ValueId input) const override;
  void build_tables(Builder& builder, const ModelPart& part, int32_t rows, DType dtype,
                    SharedTables& tables) const override;
  double forward_flops(int64_t sequence) const override;
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

 protected:
  // Of the rows of all ranks of tp.
  struct Latents {
    ValueId query;  // or the input, where there is no latent of queries
    ValueId key;
    ValueId shared_key;
  };
  Latents build_latents(const BlockContext& context, ValueId input) const;
  ValueId build_queries(const BlockContext& context, const Latents& latents) const;
  // Attention's results by its output projection.
  ValueId build_out(const BlockContext& context, ValueId attended) const;
  // The rotation of this rank's rows of each sequence.
  ValueId rope_table_of(const BlockContext& context) const;
  // Of one token, without scores and weighted sums.
  double projection_flops() const;

  const MlaSpec& spec() const { return spec_; }
  ParameterId w_kv_up() const { return w_kv_up_; }

 private:
  RopeTableAttributes table(const ModelPart& part, int32_t rows) const;
  ValueId build_latent_norm(const BlockContext& context, ValueId latent, ParameterId gain,
                            const std::string& name) const;
  AttentionHeads build_heads(const BlockContext& context, ValueId input) const;
  ValueId build_core(const BlockContext& context, const AttentionHeads& rows) const;

  const MlaSpec spec_;
  ParameterId w_q_;       // without a latent of queries,
  ParameterId w_q_down_;  // or with one
  ParameterId q_norm_;
  ParameterId w_q_up_;
  ParameterId w_kv_down_;
  ParameterId kv_norm_;
  ParameterId w_kv_up_;
  ParameterId w_out_;
};

}  // namespace troupe
