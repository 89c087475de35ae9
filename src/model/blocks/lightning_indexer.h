// The indexer of sparse attention (DeepSeek-V3.2, 2025, section 2.1), which chooses the keys of
// each query by scores of its own (ops/attention/index_topk/index_topk.h):
//
//   q = rope(c w_index_q^T)              heads of d elements, of the latent c of the queries
//   k = rope(norm(x w_index_k^T))        one head; a layer norm with gain and shift
//   w = x w_index_weights^T              one weight for each head
// The first elements of a head turn, in pairs (i, i + r / 2).
//
// It reads the model's tokens and gives them no gradient. What it learns from is a loss of its own
// (ops/losses/index_loss/index_loss.h): the main attention's distribution over the keys is the
// target.
//
// All of it is the same on all ranks of tp. With sequence parallelism each makes the keys and
// weights of its rows, gathers those of the others, and counts the whole loss as its share of it.
#pragma once

#include "model/layer_block.h"
#include "ops/attention/index_topk/index_topk.h"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "program/module.h"

namespace troupe {

// The indexer with its choice and its loss.
inline constexpr ModuleSpec kIndexerModule{};

struct IndexerSpec {
  int32_t hidden = 0;
  int32_t query_latent = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;
  int32_t top_k = 0;
  double norm_epsilon = 0;
  double loss_coefficient = 0;
  bool has_sparse_loss = false;

  int64_t query_size() const { return int64_t{heads} * head_dim; }
};
IndexerSpec indexer_spec_of(const ModelConfig& config);

class LightningIndexer {
 public:
  LightningIndexer(ParameterList& parameters, const IndexerSpec& spec, int32_t layer);

  // `input` [tokens, hidden] of this rank; `query_latent` of all ranks of tp.
  IndexInputs build(const BlockContext& context, ValueId input, ValueId query_latent,
                    ValueId rope_table) const;
  // The keys of each query.
  ValueId choose(const BlockContext& context, const IndexInputs& inputs) const;
  // Adds the loss of the layer, in training: `queries` and `keys` are those of `attention`, of the
  // heads of this rank.
  void add_loss(const BlockContext& context, const IndexInputs& inputs, ValueId chosen,
                ValueId queries, ValueId keys, const SparseAttentionAttributes& attention) const;

  // Of one token.
  double forward_flops(int64_t sequence) const;

 private:
  IndexAttributes index_of(const BlockContext& context) const;
  ValueId build_rotated(const BlockContext& context, ValueId rows, ValueId rope_table,
                        int32_t heads, const std::string& name) const;

  const IndexerSpec spec_;
  const int32_t layer_;
  ParameterId w_q_;
  ParameterId w_k_;
  ParameterId k_norm_;
  ParameterId k_norm_bias_;
  ParameterId w_weights_;
};

}  // namespace troupe
