// Sparse attention (DeepSeek-V3.2, 2025): multi-head latent attention in which each query reads the
// keys that an indexer chooses.
//
// All heads of a query have the same keys, and these are no larger than the latent: so attention is
// done in the space of the latent c, with each head's weights absorbed in its queries and results
// (DeepSeek-V2, 2024, section 2.1.2). With w_kv_up = (u_k, u_v) of a head
//   query  (u_k^T q_n, rope(q_r)),  key  (norm(c), rope(k_r)),  value norm(c)
//   result u_v (weighted sum of the values)
// which is what mla_attention.h computes, of fewer keys.
#pragma once

#include "model/blocks/lightning_indexer.h"
#include "model/blocks/mla_attention.h"

namespace troupe {

class SparseMlaAttention : public MlaAttention {
 public:
  SparseMlaAttention(ParameterList& parameters, const MlaSpec& spec, const IndexerSpec& indexer,
                     int32_t layer);

  ValueId build(const BlockContext& context, ValueId input) const override;
  double forward_flops(int64_t sequence) const override;
  std::optional<Refusal> check_layout(const Layout& layout,
                                      ContextExchange exchange) const override;

 private:
  ValueId build_absorbed_queries(const BlockContext& context, const Latents& latents,
                                 int32_t heads) const;
  ValueId build_keys(const BlockContext& context, const Latents& latents) const;

  const int32_t top_k_;
  const LightningIndexer indexer_;
};

}  // namespace troupe
