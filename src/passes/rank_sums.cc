#include "passes/rank_sums.h"

#include <array>
#include <functional>
#include <map>
#include <vector>

#include "ops/add/add.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
#include "ops/shards/shards.h"
#include "ops/sum_over_ranks/sum_over_ranks.h"

namespace troupe {
namespace {

bool is_key_value(ParameterKind kind) {
  return kind == ParameterKind::w_qkv || kind == ParameterKind::b_qkv;
}

// Where the keys' and values' rows begin that other ranks of the tp group hold, too; 0: no others
// hold them, or it has no such rows.
int64_t first_shared_row(const Parameter& parameter, const ModelPart& part) {
  if (!is_key_value(parameter.kind)) return 0;
  if (part.layout().members(RankGroup::kv_replicas, part.rank).size() == 1) return 0;
  const IndexRange& queries = parameter.slice.ranges[0].front();
  return queries.end - queries.begin;
}

// The first of the ranks that hold this shard of the slice.
bool leads(const Parameter& parameter, const ModelPart& part) {
  const DensePlace dense = part.dense();
  const GradientClass gradient = parameter.slice.gradient;
  const RankGroup replicas = part.run->distributed_optimizer
                                 ? part.shard_groups(gradient).across
                                 : part.layout().reduction_of(gradient).replicas;
  if (part.layout().members(replicas, part.rank).front() != part.rank) return false;
  switch (gradient) {
    case GradientClass::replicated:
    case GradientClass::head_norm:
      return dense.tp == 0;
    case GradientClass::embedding:
      return dense.pp == part.layout().options().embedding_places.front();
    case GradientClass::expert:
    case GradientClass::sliced:
      break;
  }
  return true;
}

// Whom the rank shares a parameter's shards with. The dense groups also stand for experts that are
// spread as everything else: one meeting for both.
ShardGroups shard_groups(GradientClass gradient, const ModelPart& part) {
  const Layout& layout = part.layout();
  const ShardGroups own = part.shard_groups(gradient);
  const ShardGroups dense = part.shard_groups(GradientClass::sliced);
  const bool alike =
      layout.members(own.within, part.rank) == layout.members(dense.within, part.rank) &&
      layout.members(own.across, part.rank) == layout.members(dense.across, part.rank);
  return alike ? dense : own;
}

// Sums, over one group after the other, of the gradients of one layer.
class LayerSums {
 public:
  LayerSums(Builder& builder, const ModelPart& part) : builder_(builder), part_(part) {}

  void add(ValueId gradient, const Parameter& parameter) {
    const GradientReduction reduction = part_.layout().reduction_of(parameter.slice.gradient);
    if (reduction.partial) partial_[*reduction.partial].push_back(gradient);
    if (part_.run->distributed_optimizer) {
      const ShardGroups groups = shard_groups(parameter.slice.gradient, part_);
      Sharded& sharded = sharded_[groups.within];
      sharded.across = groups.across;
      sharded.shard = part_.shard(parameter.slice.gradient);
      sharded.gradients.push_back(gradient);
    } else {
      // One meeting for both where experts are spread as everything else.
      const Layout& layout = part_.layout();
      const bool alike = layout.members(reduction.replicas, part_.rank) ==
                         layout.members(RankGroup::dp_cp, part_.rank);
      replicas_[alike ? RankGroup::dp_cp : reduction.replicas].push_back(gradient);
    }
    if (reduction.copies) copies_[*reduction.copies].push_back(gradient);
    if (const int64_t row = first_shared_row(parameter, part_); row > 0) {
      shared_rows_[row].push_back(gradient);
    }
  }

  void emit() {
    for (const auto& [row, gradients] : shared_rows_) {
      all_reduce(builder_, gradients, {.group = RankGroup::kv_replicas, .first_row = row});
    }
    for (const auto* sums : {&partial_, &replicas_, &copies_}) {
      for (const auto& [group, gradients] : *sums) {
        if (is_alone(group)) continue;
        all_reduce(builder_, gradients, {.group = group, .first_row = 0});
      }
    }
    // Last, as they leave only a shard of the sum.
    for (const auto& [within, sharded] : sharded_) {
      if (!is_alone(within)) reduce_shards(builder_, sharded.gradients, {.group = within});
      if (is_alone(sharded.across)) continue;
      all_reduce(builder_, sharded.gradients,
                 {.group = sharded.across, .first_row = 0, .shard = sharded.shard});
    }
  }

 private:
  using Sums = std::map<RankGroup, std::vector<ValueId>>;
  struct Sharded {
    RankGroup across;
    Shard shard;
    std::vector<ValueId> gradients;
  };

  bool is_alone(RankGroup group) const {
    return part_.layout().members(group, part_.rank).size() == 1;
  }

  Builder& builder_;
  const ModelPart& part_;
  Sums partial_;
  Sums replicas_;
  Sums copies_;
  std::map<RankGroup, Sharded> sharded_;                 // by the group within an instance
  std::map<int64_t, std::vector<ValueId>> shared_rows_;  // by the first one
};

}  // namespace

void sum_gradients_over_ranks(Builder& builder, const ModelState& state) {
  if (state.part.layout().world_size() == 1) return;
  const Place caller_place = builder.place;
  std::map<int32_t, LayerSums, std::greater<>> layers;
  for (const Parameter& parameter : state.parameters) {
    layers.try_emplace(parameter.layer, builder, state.part)
        .first->second.add(builder.state(parameter.gradient), parameter);
  }
  for (auto& [layer, sums] : layers) {
    builder.place.layer = static_cast<int16_t>(layer);
    sums.emit();
  }
  builder.place = caller_place;
}

ValueId squared_gradient_norm(Builder& builder, const ModelState& state) {
  // By the rows that count (0: all) and the shard.
  std::map<std::array<int64_t, 3>, std::vector<ValueId>> counted;
  for (const Parameter& parameter : state.parameters) {
    if (!leads(parameter, state.part)) continue;
    const int64_t shared = first_shared_row(parameter, state.part);
    const bool leads_shared =
        shared == 0 ||
        state.part.layout().members(RankGroup::kv_replicas, state.part.rank).front() ==
            state.part.rank;
    const Shard shard = state.part.shard(parameter.slice.gradient);
    counted[{leads_shared ? 0 : shared, shard.place, shard.count}].push_back(
        builder.state(parameter.gradient));
  }
  ValueId sum;
  for (const auto& [which, gradients] : counted) {
    const Shard shard{static_cast<int32_t>(which[1]), static_cast<int32_t>(which[2])};
    const ValueId squares =
        squared_norm(builder, gradients, {.rows = which[0], .shard = shard}, "squared_norm");
    sum = sum.valid() ? add(builder, sum, squares, "squared_norms") : squares;
  }
  if (state.part.layout().world_size() == 1) return sum;
  if (!sum.valid()) sum = fill(builder, 0, DType::f64, {1}, "squared_norm");
  return sum_over_ranks(builder, sum, {.group = RankGroup::world}, "squared_norm_of_all");
}

void gather_parameters_over_ranks(Builder& builder, const ModelState& state) {
  if (!state.part.run->distributed_optimizer) return;
  std::map<RankGroup, std::vector<ValueId>> gathered;
  for (const Parameter& parameter : state.parameters) {
    const GradientClass gradient = parameter.slice.gradient;
    if (state.part.shard(gradient).count == 1) continue;
    gathered[shard_groups(gradient, state.part).within].push_back(builder.state(parameter.value));
  }
  for (const auto& [group, parameters] : gathered) {
    gather_shards(builder, parameters, {.group = group});
  }
}

void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics) {
  if (state.part.layout().world_size() == 1) return;
  all_reduce(builder, metrics, {.group = RankGroup::world, .first_row = 0});
}

}  // namespace troupe
