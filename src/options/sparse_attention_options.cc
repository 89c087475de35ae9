#include "options/sparse_attention_options.h"

#include <string_view>

#include "options/moe_options.h"
#include "options/refuse_without.h"

namespace troupe {

void override_sparse_attention(const Options& options, ModelConfig& config) {
  const bool is_asked = options.experimental_attention_variant == AttentionVariant::sparse;
  if (is_asked && !config.has_sparse_attention()) {
    constexpr std::string_view kVariant = "experimental-attention-variant";
    refuse_without(!options.dsa_indexer_topk, kVariant, "dsa-indexer-topk");
    refuse_without(!options.dsa_indexer_n_heads, kVariant, "dsa-indexer-n-heads");
    refuse_without(!options.dsa_indexer_head_dim, kVariant, "dsa-indexer-head-dim");
  } else if (!config.has_sparse_attention()) {
    constexpr std::string_view kNeeded = "experimental-attention-variant dsa";
    refuse_without(options.dsa_indexer_topk.has_value(), "dsa-indexer-topk", kNeeded);
    refuse_without(options.dsa_indexer_n_heads.has_value(), "dsa-indexer-n-heads", kNeeded);
    refuse_without(options.dsa_indexer_head_dim.has_value(), "dsa-indexer-head-dim", kNeeded);
    refuse_without(options.dsa_indexer_k_norm_epsilon.has_value(), "dsa-indexer-k-norm-epsilon",
                   kNeeded);
    refuse_without(options.dsa_indexer_loss_coeff.has_value(), "dsa-indexer-loss-coeff", kNeeded);
    refuse_without(options.dsa_indexer_use_sparse_loss.has_value(), "dsa-indexer-use-sparse-loss",
                   kNeeded);
    return;
  }
  override_with(options.dsa_indexer_topk, config.dsa_indexer_topk);
  override_with(options.dsa_indexer_n_heads, config.dsa_indexer_n_heads);
  override_with(options.dsa_indexer_head_dim, config.dsa_indexer_head_dim);
  override_with(options.dsa_indexer_k_norm_epsilon, config.dsa_indexer_k_norm_epsilon);
  override_with(options.dsa_indexer_loss_coeff, config.dsa_indexer_loss_coeff);
  override_with(options.dsa_indexer_use_sparse_loss, config.dsa_indexer_use_sparse_loss);
}

}  // namespace troupe
