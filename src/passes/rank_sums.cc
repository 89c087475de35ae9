#include "passes/rank_sums.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"
#include "ops/optimizer/shards/shards.h"

namespace troupe {
namespace {

// The rows that other ranks of the tp group hold, too (of keys and values), of a tensor that has
// the elements `held` of the slice: from this one on. Nothing when there are none.
std::optional<int64_t> first_shared_row(const Parameter& parameter, const IndexRange& held) {
  if (!parameter.slice.first_shared) return std::nullopt;
  const int64_t row = parameter.whole_shape.row_elements();
  const int64_t shared = *parameter.slice.first_shared - held.begin / row;
  if (shared >= (held.end - held.begin) / row) return std::nullopt;
  return std::max<int64_t>(shared, 0);
}

// The first of the ranks that hold this shard of the slice.
bool leads(const Parameter& parameter, const ModelPart& part) {
  const DensePlace dense = part.dense();
  const GradientClass gradient = parameter.gradient_class;
  const RankGroup replicas = part.run->sharding == StateSharding::none
                                 ? part.layout().reduction_of(gradient).replicas
                                 : part.shard_groups(gradient).across;
  if (part.layout().place_in(replicas, part.rank).place != 0) return false;
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

// The ranks over which a parameter is sharded. The dense groups also stand for experts that are
// spread as everything else: one collective for both.
ShardGroups shard_groups(GradientClass gradient, const ModelPart& part) {
  const Layout& layout = part.layout();
  const ShardGroups own = part.shard_groups(gradient);
  const ShardGroups dense = part.shard_groups(GradientClass::sliced);
  const bool alike =
      layout.members(own.within, part.rank) == layout.members(dense.within, part.rank) &&
      layout.members(own.across, part.rank) == layout.members(dense.across, part.rank);
  return alike ? dense : own;
}

// The shard of a whole slice that is this rank's.
Shard own_shard(const Parameter& parameter, const ModelPart& part) {
  if (part.run->sharding != StateSharding::optimizer) return {};
  Shard shard = part.shard(parameter.gradient_class);
  shard.owner = parameter.owner;
  return shard;
}

// When the backward pass completes the gradient: first what follows the layers, then layer by
// layer, and the embedding in the end.
int32_t completion(const Parameter& parameter) {
  if (parameter.layer >= 0) return -parameter.layer;
  return parameter.is_with_embedding ? 1 : std::numeric_limits<int32_t>::min();
}

// Sums, over one group after the other, of the gradients of one bucket.
class GradientSums {
 public:
  GradientSums(Builder& builder, const ModelPart& part) : builder_(builder), part_(part) {}

  void add(ValueId gradient, const Parameter& parameter) {
    const GradientReduction reduction = part_.layout().reduction_of(parameter.gradient_class);
    if (reduction.partial) partial_[*reduction.partial].push_back(gradient);
    const ShardGroups groups = shard_groups(parameter.gradient_class, part_);
    switch (part_.run->sharding) {
      case StateSharding::none: {
        // One collective for both where experts are spread as everything else.
        const Layout& layout = part_.layout();
        const bool alike = layout.members(reduction.replicas, part_.rank) ==
                           layout.members(RankGroup::dp_cp, part_.rank);
        replicas_[alike ? RankGroup::dp_cp : reduction.replicas].push_back(gradient);
        break;
      }
      case StateSharding::optimizer: {
        Sharded& sharded = sharded_[groups.within];
        sharded.across = groups.across;
        sharded.tensors.add(gradient, parameter.owner);
        const Shard own = own_shard(parameter, part_);
        if (own.owner < 0) sharded.shard = own;
        if (own.owner == own.place) sharded.own.push_back(gradient);
        break;
      }
      case StateSharding::parameters:  // summed within the group as the backward pass went
        replicas_[groups.across].push_back(gradient);
        break;
    }
    if (reduction.copies) copies_[*reduction.copies].push_back(gradient);
    if (const std::optional<int64_t> row = first_shared_row(parameter, parameter.held)) {
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
      if (!is_alone(within)) reduce_shards(builder_, sharded.tensors, within);
      if (is_alone(sharded.across)) continue;
      const auto sum = [&, across = sharded.across](std::span<const ValueId> tensors, Shard shard) {
        if (tensors.empty()) return;
        all_reduce(builder_, tensors, {.group = across, .first_row = 0, .shard = shard});
      };
      sum(sharded.tensors.cut, sharded.shard);
      sum(sharded.own, {});
    }
  }

 private:
  using Sums = std::map<RankGroup, std::vector<ValueId>>;
  struct Sharded {
    RankGroup across;
    Shard shard;  // of those that are cut
    ShardedTensors tensors;
    std::vector<ValueId> own;  // of those with an owner
  };

  bool is_alone(RankGroup group) const {
    return part_.layout().place_in(group, part_.rank).ranks == 1;
  }

  Builder& builder_;
  const ModelPart& part_;
  Sums partial_;
  Sums replicas_;
  Sums copies_;
  std::map<RankGroup, Sharded> sharded_;                 // by the group within an instance
  std::map<int64_t, std::vector<ValueId>> shared_rows_;  // by the first one
};

// What the rank has to do with a tensor that has the elements `held` of the slice.
GradientDuty duty_for(const Parameter& parameter, const ModelPart& part, const IndexRange& held) {
  GradientDuty duty{.counts = leads(parameter, part),
                    .first_shared_row = first_shared_row(parameter, held)};
  if (!duty.first_shared_row) return duty;
  duty.leads_shared = part.layout().place_in(RankGroup::kv_replicas, part.rank).place == 0;
  if (!duty.leads_shared && *duty.first_shared_row == 0) duty.counts = false;
  return duty;
}

}  // namespace

GradientDuty gradient_duty(const Parameter& parameter, const ModelPart& part) {
  return duty_for(parameter, part, parameter.held);
}

void sum_gradients_over_ranks(Builder& builder, const ModelState& state, int64_t bucket_elements) {
  if (state.part.layout().world_size() == 1) return;
  std::map<int32_t, std::vector<const Parameter*>> steps;
  for (const Parameter& parameter : state.parameters) {
    steps[completion(parameter)].push_back(&parameter);
  }
  const PlaceScope scope(builder);
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
}

namespace {

// A parameter's gradient or weights, as far as they stand for themselves: elements `held` of the
// slice, of which those of the shard are counted.
struct CountedTensor {
  StateId tensor;
  IndexRange held;
  Shard shard;
};

// The sum over all elements of the model, each counted once, however many ranks hold it.
// `tensor_of` says what is summed of a parameter.
template <class TensorOf>
ValueId sum_over_model(Builder& builder, const ModelState& state, NormTerm term,
                       const std::string& name, const TensorOf& tensor_of) {
  // By the rows that count (0: all) and the shard.
  std::map<std::array<int64_t, 3>, std::vector<ValueId>> counted;
  for (const Parameter& parameter : state.parameters) {
    CountedTensor own = tensor_of(parameter);
    const GradientDuty duty = duty_for(parameter, state.part, own.held);
    if (!duty.counts) continue;
    if (own.shard.owner >= 0) {
      if (own.shard.owner != own.shard.place) continue;
      own.shard = {};
    }
    const int64_t rows = duty.leads_shared ? 0 : *duty.first_shared_row;
    counted[{rows, own.shard.place, own.shard.count}].push_back(builder.state(own.tensor));
  }
  ValueId sum;
  for (const auto& [which, tensors] : counted) {
    const Shard shard{static_cast<int32_t>(which[1]), static_cast<int32_t>(which[2])};
    const ValueId part =
        squared_norm(builder, tensors, {.rows = which[0], .shard = shard, .term = term}, name);
    sum = sum.valid() ? add(builder, sum, part, name + "s") : part;
  }
  if (state.part.layout().world_size() == 1) return sum;
  if (!sum.valid()) sum = fill(builder, 0, DType::f64, {1}, name);
  return sum_over_ranks(builder, sum, {.group = RankGroup::world}, name + "_of_all");
}

// A gradient of which only the shard is here, or else only the shard is summed.
CountedTensor gradient_of(const Parameter& parameter, const ModelPart& part) {
  return {parameter.gradient, parameter.held, own_shard(parameter, part)};
}

CountedTensor weights_of(const Parameter& parameter, const ModelPart& part) {
  if (parameter.master.valid()) return {parameter.master, parameter.shard, Shard{}};
  return {parameter.value, parameter.held, own_shard(parameter, part)};
}

}  // namespace

ValueId squared_gradient_norm(Builder& builder, const ModelState& state) {
  return sum_over_model(
      builder, state, NormTerm::square, "squared_norm",
      [&](const Parameter& parameter) { return gradient_of(parameter, state.part); });
}

ValueId zero_gradients(Builder& builder, const ModelState& state) {
  return sum_over_model(
      builder, state, NormTerm::zero, "zero_gradient",
      [&](const Parameter& parameter) { return gradient_of(parameter, state.part); });
}

ValueId squared_parameter_norm(Builder& builder, const ModelState& state) {
  return sum_over_model(
      builder, state, NormTerm::square, "squared_parameter",
      [&](const Parameter& parameter) { return weights_of(parameter, state.part); });
}

void gather_parameters_over_ranks(Builder& builder, const ModelState& state,
                                  std::span<const Parameter> parameters) {
  if (state.part.run->sharding != StateSharding::optimizer) return;
  std::map<RankGroup, ShardedTensors> values_of;
  for (const Parameter& parameter : parameters) {
    const GradientClass gradient = parameter.gradient_class;
    if (state.part.shard(gradient).count == 1 || !(*state.table)[parameter.value].is_stored)
      continue;
    values_of[shard_groups(gradient, state.part).within].add(builder.state(parameter.value),
                                                             parameter.owner);
  }
  for (const auto& [group, values] : values_of) {
    gather_shards(builder, values, group);
  }
}

void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics) {
  if (state.part.layout().world_size() == 1) return;
  all_reduce(builder, metrics, {.group = RankGroup::world, .first_row = 0});
}

}  // namespace troupe
