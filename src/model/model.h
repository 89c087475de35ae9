// Model: a decoder as a list of layers, each of two norms, a mixer and a feed-forward
// (layer_block.h), layers of multi-token prediction, and the parameters that all of them declared.
// Made once from a configuration; ranks, layouts and programs refer to it.
//
// Does not change after it is made; any thread may read it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "model/blocks/norm.h"
#include "model/layer_block.h"
#include "model/model_config.h"
#include "model/mtp_layer.h"
#include "model/parameter_spec.h"

namespace troupe {

struct DecoderLayer {
  Norm input_norm;
  std::unique_ptr<const LayerBlock> mixer;
  Norm feed_forward_norm;
  std::unique_ptr<const LayerBlock> feed_forward;
};

// Makes the block of one layer: it declares its parameters in the list.
using BlockMaker = std::function<std::unique_ptr<const LayerBlock>(
    ParameterList& parameters, const ModelConfig& config, int32_t layer)>;

// Which blocks a model's layers have; layers need not be alike.
struct BlockMakers {
  BlockMaker mixer;
  BlockMaker feed_forward;
};
// Those that the configuration says: grouped-query attention; experts, or a dense MLP.
BlockMakers blocks_of_config();

class Model {
 public:
  // Refuses an impossible configuration (ModelConfig::validate).
  explicit Model(const ModelConfig& config, const BlockMakers& makers = blocks_of_config());
  // Blocks refer to the configuration.
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  const std::vector<ParameterSpec>& parameters() const { return list_.parameters(); }
  const std::vector<RouterStateSpec>& router_states() const { return list_.router_states(); }
  // Those of multi-token prediction come after the others.
  const DecoderLayer& layer(int32_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  // Of depth index + 1.
  const MtpLayer& mtp_layer(int32_t index) const { return mtp_layers_[static_cast<size_t>(index)]; }
  ParameterId embedding() const { return embedding_; }
  // The embedding's weights where they are tied.
  ParameterId head() const { return head_; }
  const Norm& final_norm() const { return final_norm_; }

  // Elements of all parameters; `active`: those that one token's result depends on.
  int64_t parameter_count() const;
  int64_t active_parameter_count() const;

  // Of one token's forward pass, as LayerBlock::forward_flops: of a layer, and of the head.
  double layer_flops(int32_t layer, int64_t sequence) const;
  double head_flops() const;
  // What a layer of multi-token prediction has beside those of its layer and its head.
  double mtp_flops() const;
  // Of one sequence, forward and backward (3 x forward).
  double training_flops(int64_t sequence) const;

 private:
  void add_layer(int32_t layer, const BlockMakers& makers);

  const ModelConfig config_;
  ParameterList list_;
  ParameterId embedding_;
  std::vector<DecoderLayer> layers_;
  std::vector<MtpLayer> mtp_layers_;
  Norm final_norm_;
  ParameterId head_;
};

}  // namespace troupe
