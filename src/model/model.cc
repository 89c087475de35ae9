#include "model/model.h"

#include <utility>

#include "model/blocks/dense_mlp.h"
#include "model/blocks/gated_delta_net.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/mla_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/sparse_mla_attention.h"

namespace troupe {

BlockMakers blocks_of_config() {
  return {.mixer = [](ParameterList& parameters, const ModelConfig& config,
                      int32_t layer) -> std::unique_ptr<const LayerBlock> {
            if (config.has_sparse_attention()) {
              return std::make_unique<SparseMlaAttention>(parameters, mla_spec_of(config),
                                                          indexer_spec_of(config), layer);
            }
            if (config.multi_latent_attention) {
              return std::make_unique<MlaAttention>(parameters, mla_spec_of(config), layer);
            }
            if (config.has_linear_attention(layer)) {
              return std::make_unique<GatedDeltaNet>(parameters, delta_net_spec_of(config), layer);
            }
            return std::make_unique<GqaAttention>(parameters, gqa_spec_of(config, layer), layer);
          },
          .feed_forward = [](ParameterList& parameters, const ModelConfig& config,
                             int32_t layer) -> std::unique_ptr<const LayerBlock> {
            if (config.is_moe_layer(layer)) return std::make_unique<Moe>(parameters, config, layer);
            return std::make_unique<DenseMlp>(parameters,
                                              mlp_spec_of(config, config.ffn_hidden_size), layer);
          }};
}

Model::Model(const ModelConfig& config, const BlockMakers& makers)
    : config_(config), list_(config_) {
  config_.validate();
  const Shape vocabulary = {config_.vocab_size, config_.hidden_size};
  const Cut rows = cut_anywhere(0, CutOver::tp, config_.vocab_size, "the vocabulary");
  embedding_ = list_.embedding("embedding", vocabulary,
                               {
                                   .cuts = {rows},
                                   .gradient_class = GradientClass::embedding,
                               },
                               config_.embedding_init_method_std);
  list_.at(embedding_).is_with_embedding = true;
  list_.at(embedding_).is_with_loss = config_.tie_embeddings;
  list_.at(embedding_).is_outer = true;
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) add_layer(layer, makers);
  list_.layer = -1;
  const auto first_at_loss = list_.parameters().size();
  final_norm_ = Norm(list_, config_, "final_norm");
  const auto first_of_head = list_.parameters().size();
  head_ = embedding_;
  if (!config_.tie_embeddings) {
    head_ = list_.weight("head", vocabulary, {.cuts = {rows}});
    list_.at(head_).is_outer = true;
  }
  for (size_t i = first_at_loss; i < list_.parameters().size(); ++i) {
    ParameterSpec& parameter = list_.at({static_cast<int32_t>(i)});
    (i < first_of_head ? parameter.is_final_norm : parameter.is_with_loss) = true;
  }
  // Last, so that the model's own parameters start as they do without these layers.
  for (int32_t layer = config_.num_layers; layer < config_.all_layers(); ++layer) {
    list_.layer = config_.owner_of(layer);
    list_.repeats = !config_.is_owner(layer);
    const auto first = list_.parameters().size();
    mtp_layers_.emplace_back(list_, config_);
    for (size_t i = first; i < list_.parameters().size(); ++i) {
      list_.at({static_cast<int32_t>(i)}).is_of_mtp = true;
    }
    add_layer(layer, makers);
  }
}

void Model::add_layer(int32_t layer, const BlockMakers& makers) {
  list_.layer = config_.owner_of(layer);
  DecoderLayer blocks;
  blocks.input_norm = Norm(list_, config_, "input_norm");
  blocks.mixer = makers.mixer(list_, config_, layer);
  blocks.feed_forward_norm = Norm(list_, config_, "post_attention_norm");
  blocks.feed_forward = makers.feed_forward(list_, config_, layer);
  layers_.push_back(std::move(blocks));
}

int64_t Model::parameter_count() const {
  int64_t count = 0;
  for (const ParameterSpec& parameter : parameters()) count += parameter.whole_shape.elements();
  return count;
}

int64_t Model::active_parameter_count() const {
  int64_t count = 0;
  for (const ParameterSpec& parameter : parameters()) count += parameter.active_elements;
  return count;
}

double Model::layer_flops(int32_t number, int64_t sequence) const {
  return layer(number).mixer->forward_flops(sequence) +
         layer(number).feed_forward->forward_flops(sequence);
}

double Model::head_flops() const {
  return 2.0 * config_.hidden_size * config_.vocab_size;
}

double Model::mtp_flops() const {
  const double hidden = config_.hidden_size;
  return 2.0 * (2 * hidden * hidden + 3 * hidden);  // Megatron's report counts its norms
}

double Model::training_flops(int64_t sequence) const {
  double of_token = head_flops() + config_.mtp_num_layers * (mtp_flops() + head_flops());
  for (int32_t layer = 0; layer < config_.all_layers(); ++layer) {
    of_token += layer_flops(layer, sequence);
  }
  return 3.0 * static_cast<double>(sequence) * of_token;
}

}  // namespace troupe
