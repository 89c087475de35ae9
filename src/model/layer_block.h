// Blocks: what a layer is made of. A mixer lets tokens see each other (attention), a feed-forward
// works on each by itself (an MLP, experts); both turn the normed residual stream into the branch
// that is added to it.
//
// A block declares its parameters when it is made, once for the whole model, with how ranks may cut
// them (parameter_spec.h). It knows its layer, and builds the layer's forward pass for each rank
// and micro-batch from that rank's state. Blocks do not change after that; any thread may use them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/context_parallel.h"
#include "model/forward_pass.h"
#include "model/parameter_spec.h"
#include "model/random_place.h"
#include "ops/attention/rope/rope.h"
#include "program/builder.h"

namespace troupe {

struct ModelState;

// Values that all layers and micro-batches of one program share: rotation tables.
class SharedTables {
 public:
  // The table; emitted with the first call for it.
  ValueId rope(Builder& builder, const RopeTableAttributes& attributes, DType dtype);

 private:
  struct Table {
    RopeTableAttributes attributes;
    ValueId value;
  };
  std::vector<Table> tables_;
};

// What a block builds from, for one micro-batch on one rank.
struct BlockContext {
  Builder& builder;
  const ModelState& state;
  SharedTables& tables;
  const BatchValues& batch;
  const ForwardOptions& options;
  ForwardResult& result;  // takes auxiliary losses and reports of routers

  // The rank's whole slice of the parameter (read_parameter.h); invalid where `id` is.
  ValueId parameter(ParameterId id) const;
  const ModelPart& part() const;
};

class LayerBlock {
 public:
  explicit LayerBlock(int32_t layer) : layer_(layer) {}
  virtual ~LayerBlock() = default;
  LayerBlock(const LayerBlock&) = delete;
  LayerBlock& operator=(const LayerBlock&) = delete;

  // `input` [tokens, hidden]: the normed residual stream. Returns the branch.
  virtual ValueId build(const BlockContext& context, ValueId input) const = 0;

  // Emits the tables that build() will read, for sequences of which the rank has `rows` rows.
  virtual void build_tables(Builder&, const ModelPart&, int32_t, DType, SharedTables&) const {}

  // Of the forward pass of one of `sequence` tokens, in products of matrices that weigh (no router,
  // no gate of one number), causal attention at half: what Megatron's report counts.
  virtual double forward_flops(int64_t sequence) const = 0;

  // Refuses a layout that cannot cut the block.
  [[nodiscard]] virtual std::optional<Refusal> check_layout(const Layout& layout,
                                                            ContextExchange exchange) const = 0;

 protected:
  int32_t layer() const { return layer_; }
  uint32_t substream(const BlockContext& context, RandomPlace place) const {
    return random_substream(place, layer_, context.options.micro_batch);
  }

 private:
  const int32_t layer_;
};

}  // namespace troupe
