#include "passes/rank_sums.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
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

// The keys' and values' rows of the main gradient that other ranks of the tp group hold, too: from
// this one on. Nothing when there are none.
std::optional<int64_t> first_shared_row(const Parameter& parameter, const ModelPart& part) {
  if (!is_key_value(parameter.kind)) return std::nullopt;
  if (part.layout().members(RankGroup::kv_replicas, part.rank).size() == 1) return std::nullopt;
  const IndexRange& queries = parameter.slice.ranges[0].front();
  const int64_t row = parameter.whole_shape.row_elements();
  const int64_t shared = queries.end - queries.begin - parameter.held.begin / row;
  if (shared >= (parameter.held.end - parameter.held.begin) / row) return std::nullopt;
  return std::max<int64_t>(shared, 0);
}

// The first of the ranks that hold this shard of the slice.
bool leads(const Parameter& parameter, const ModelPart& part) {
  const DensePlace dense = part.dense();
  const GradientClass gradient = parameter.slice.gradient;
  const RankGroup replicas = part.run->sharding == StateSharding::none
                                 ? part.layout().reduction_of(gradient).replicas
                                 : part.shard_groups(gradient).across;
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

// When the backward pass completes the gradient: first what stands behind the layers, then layer by
// layer, and the embedding in the end.
int32_t completion(const Parameter& parameter) {
  if (parameter.layer >= 0) return -parameter.layer;
  return parameter.kind == ParameterKind::embedding ? 1 : std::numeric_limits<int32_t>::min();
}

// Sums, over one group after the other, of the gradients of one bucket.
class GradientSums {
 public:
  GradientSums(Builder& builder, const ModelPart& part) : builder_(builder), part_(part) {}

  void add(ValueId gradient, const Parameter& parameter) {
    const GradientReduction reduction = part_.layout().reduction_of(parameter.slice.gradient);
    if (reduction.partial) partial_[*reduction.partial].push_back(gradient);
    const ShardGroups groups = shard_groups(parameter.slice.gradient, part_);
    switch (part_.run->sharding) {
      case StateSharding::none: {
        // One meeting for both where experts are spread as everything else.
        const Layout& layout = part_.layout();
        const bool alike = layout.members(reduction.replicas, part_.rank) ==
                           layout.members(RankGroup::dp_cp, part_.rank);
        replicas_[alike ? RankGroup::dp_cp : reduction.replicas].push_back(gradient);
        break;
      }
      case StateSharding::optimizer: {
        Sharded& sharded = sharded_[groups.within];
        sharded.across = groups.across;
        sharded.shard = part_.shard(parameter.slice.gradient);
        sharded.gradients.push_back(gradient);
        break;
      }
      case StateSharding::parameters:  // summed within the group as the backward pass went
        replicas_[groups.across].push_back(gradient);
        break;
    }
    if (reduction.copies) copies_[*reduction.copies].push_back(gradient);
    if (const std::optional<int64_t> row = first_shared_row(parameter, part_)) {
      shared_rows_[*row].push_back(gradient);
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

void sum_gradients_over_ranks(Builder& builder, const ModelState& state, int64_t bucket_elements) {
  if (state.part.layout().world_size() == 1) return;
  std::map<int32_t, std::vector<const Parameter*>> steps;
  for (const Parameter& parameter : state.parameters) {
    steps[completion(parameter)].push_back(&parameter);
  }
  const Place caller_place = builder.place;
  std::optional<GradientSums> bucket;
  int64_t elements = 0;
  for (const auto& [step, parameters] : steps) {
    if (!bucket) bucket.emplace(builder, state.part);
    for (const Parameter* parameter : parameters) {
      bucket->add(builder.state(parameter->gradient), *parameter);
      elements += parameter->held.end - parameter->held.begin;
    }
    if (elements < bucket_elements && step != steps.rbegin()->first) continue;
    builder.place.layer = static_cast<int16_t>(parameters.front()->layer);
    bucket->emit();
    bucket.reset();
    elements = 0;
  }
  builder.place = caller_place;
}

ValueId squared_gradient_norm(Builder& builder, const ModelState& state) {
  // By the rows that count (0: all) and the shard.
  std::map<std::array<int64_t, 3>, std::vector<ValueId>> counted;
  for (const Parameter& parameter : state.parameters) {
    if (!leads(parameter, state.part)) continue;
    const std::optional<int64_t> shared = first_shared_row(parameter, state.part);
    const bool leads_shared =
        !shared || state.part.layout().members(RankGroup::kv_replicas, state.part.rank).front() ==
                       state.part.rank;
    if (!leads_shared && *shared == 0) continue;
    // A gradient of which only the shard is here, or else only the shard is summed.
    const Shard shard = state.part.run->sharding == StateSharding::optimizer
                            ? state.part.shard(parameter.slice.gradient)
                            : Shard{};
    counted[{leads_shared ? 0 : *shared, shard.place, shard.count}].push_back(
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

void gather_parameters_over_ranks(Builder& builder, const ModelState& state,
                                  std::span<const Parameter> parameters) {
  if (state.part.run->sharding != StateSharding::optimizer) return;
  std::map<RankGroup, std::vector<ValueId>> values_of;
  for (const Parameter& parameter : parameters) {
    const GradientClass gradient = parameter.slice.gradient;
    if (state.part.shard(gradient).count == 1) continue;
    values_of[shard_groups(gradient, state.part).within].push_back(builder.state(parameter.value));
  }
  for (const auto& [group, values] : values_of) {
    gather_shards(builder, values, {.group = group});
  }
}

void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics) {
  if (state.part.layout().world_size() == 1) return;
  all_reduce(builder, metrics, {.group = RankGroup::world, .first_row = 0});
}

}  // namespace troupe
