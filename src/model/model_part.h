// Which part of the model and of the work on it is one rank's: the layout of the run, and the
// rank's place in it. Plain values; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/dtype.h"
#include "optimizer/optimizer.h"
#include "parallel/layout.h"
#include "parallel/pipeline_partition.h"
#include "parallel/pipeline_schedule.h"
#include "program/module.h"
#include "program/shard.h"

namespace troupe {

// What is sharded over the ranks that use the same slice of a parameter, so that each keeps one
// shard of it. With optimizer instances: the ranks of one instance.
enum class StateSharding : uint8_t {
  none,
  optimizer,   // moments and master weights: a rank updates its shard, and gives it to the others
  parameters,  // all state: values are gathered for each use, gradients summed into shards
};

// Weights that no product reads but as codes of 8 bits: they are kept as master weights alone, and
// ranks give each other codes.
struct WeightCodes {
  KeptProducts kept = {};  // whose weights are not among them
  // Scales are those of blocks, of at most kTransposedRows rows: shards have to leave these whole.
  bool has_blocks = false;
};

// The same for all ranks: the two meshes, the stages of the pipeline, the order of its work.
struct RunLayout {
  Layout layout;
  PipelinePartition partition;
  PipelineShape schedule;  // its micro-batches are those of one step and one pipeline
  StateSharding sharding = StateSharding::none;
  // Of the main gradients of bf16 parameters: f32 or bf16. Those of other parameters have these
  // parameters' own dtype.
  DType main_gradients = DType::f32;
  std::shared_ptr<const Optimizer> optimizer = default_optimizer();
  // The optimizer's tensors and master weights of a rank's first parameters, up to this part of all
  // that it updates, are kept on the host (StateTensor::on_host).
  double optimizer_offload = 0;
  // Of how many steps the largest elements of what products read are kept (docs/low_precision.md,
  // `delayed`); 0: of none.
  int32_t amax_history = 0;
  std::optional<WeightCodes> weight_codes = {};
  // How many rows a rank's experts have room for where ranks share the experts, times those of an
  // even load; 0: as many as may come (docs/memory.md, "Room for experts").
  double expert_room = 0;
  // Where ranks share the experts: how many copies of others' experts each has room for, which take
  // rows of those that get most (ops/routing/clone_placement). In training steps alone.
  int32_t expert_clones = 0;
  // By RankGroup: the GPUs of some such group do not reach each other's memory (--gpu-exchange).
  std::array<bool, kRankGroupCount> is_staged{};
};

// The ranks over which a parameter is sharded, and those that have the same shard.
struct ShardGroups {
  RankGroup within = RankGroup::dp_cp_within_instance;
  RankGroup across = RankGroup::dp_cp_across_instances;
};

// All of `layers` layers, and those of multi-token prediction, on one rank.
RunLayout layout_of_one_rank(int32_t layers, int32_t mtp_layers = 0);

struct ModelPart {
  std::shared_ptr<const RunLayout> run;
  int32_t rank = 0;

  const Layout& layout() const { return run->layout; }
  const PipelinePartition& partition() const { return run->partition; }
  DensePlace dense() const { return layout().dense_place(rank); }
  ExpertPlace expert() const { return layout().expert_place(rank); }
  // Do the ranks of a tp group share the tokens between their products?
  bool sequence_parallel() const {
    return layout().options().sequence_parallel && layout().tp() > 1;
  }
  // Of each dp successive micro-batches of a step, the ranks of one dp coordinate run one: the
  // number in the whole step of those ranks' micro-batch.
  int32_t global_micro_batch(int32_t micro_batch) const {
    return micro_batch * layout().dp() + dense().dp;
  }
  ShardGroups shard_groups(GradientClass gradient) const {
    if (gradient != GradientClass::expert) return {};
    return {RankGroup::edp_within_instance, RankGroup::edp_across_instances};
  }
  // The rank's groups that are staged, with their sizes; those of one rank exchange nothing.
  StagedGroups staged_groups() const;
  // The shard of such parameters that is the rank's.
  Shard shard(GradientClass gradient) const;
  // Of the decoder, or, numbered after those, of multi-token prediction.
  bool has_layer(int32_t layer) const { return partition().rank_of_layer(layer) == dense().pp; }
  // Places of each rank for copies of others' experts.
  int32_t expert_clones() const { return layout().ep() > 1 ? run->expert_clones : 0; }
  // The experts of all ranks that share them, and places for copies; 0 where there are none of
  // those.
  int32_t expert_slots(int32_t experts) const {
    return expert_clones() > 0 ? experts + layout().ep() * expert_clones() : 0;
  }
  // The stage that is this rank's chunk number `chunk`.
  const PipelineStage& stage(int32_t chunk) const {
    return partition().stages[static_cast<size_t>(
        stage_at(partition().placement, partition().ranks, {dense().pp, chunk}))];
  }
};

}  // namespace troupe
