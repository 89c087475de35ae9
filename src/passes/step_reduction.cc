#include "passes/step_reduction.h"

#include <functional>
#include <map>
#include <vector>

#include "ops/accumulate/accumulate.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"

namespace troupe {
namespace {

// Is this the one rank among those with the same part of a gradient that counts it?
bool counts(const ModelPart& part, GradientClass kind) {
  const Layout& layout = part.layout();
  const auto leads = [&](RankGroup group) {
    return layout.members(group, part.rank).front() == part.rank;
  };
  const GradientReduction reduction = layout.reduction_of(kind);
  const bool whole = kind == GradientClass::replicated || kind == GradientClass::head_norm;
  return leads(reduction.replicas) && (!reduction.copies || leads(*reduction.copies)) &&
         (!whole || leads(RankGroup::tp));
}

}  // namespace

void MetricSums::add(ValueId metric, ValueId value, double weight) {
  accumulate(builder_, metric, value, weight, /*overwrite=*/written_.insert(metric.index).second);
}

void MetricSums::add_nothing(ValueId metric) {
  if (written_.contains(metric.index)) return;
  const Shape shape = builder_.value(metric).shape;
  add(metric, fill(builder_, 0, DType::f64, shape, "nothing"), 1);
}

void reduce_gradients(Builder& builder, const ModelState& state, int32_t replicas) {
  const Place caller_place = builder.place;
  if (replicas > 1) {
    std::map<int32_t, std::vector<ValueId>, std::greater<>> gradients;
    for (const Parameter& parameter : state.parameters) {
      gradients[parameter.layer].push_back(builder.state(parameter.gradient));
    }
    for (const auto& [layer, tensors] : gradients) {
      builder.place.layer = static_cast<int16_t>(layer);
      all_reduce(builder, tensors, {});
    }
    builder.place = caller_place;
  }
  for (const Parameter& parameter : state.parameters) {
    const auto copies = state.part.layout().reduction_of(parameter.slice.gradient).copies;
    if (!copies) continue;
    all_reduce(builder, {{builder.state(parameter.gradient)}}, {.group = *copies});
  }
}

void reduce_metrics(Builder& builder, const ModelPart& part, int32_t replicas,
                    std::span<const ValueId> metrics, MetricSums& sums) {
  const bool has_layout = part.layout().world_size() > 1;
  if (!has_layout && replicas == 1) return;
  if (metrics.empty()) return;
  for (const ValueId metric : metrics) sums.add_nothing(metric);
  all_reduce(builder, metrics,
             {.group = has_layout ? RankGroup::world : AllReduceAttributes{}.group});
}

ValueId build_squares(Builder& builder, const ModelState& state) {
  const bool has_layout = state.part.layout().world_size() > 1;
  std::vector<ValueId> gradients;
  for (const Parameter& parameter : state.parameters) {
    if (has_layout && !counts(state.part, parameter.slice.gradient)) continue;
    gradients.push_back(builder.state(parameter.gradient));
  }
  const ValueId squares = gradients.empty() ? fill(builder, 0, DType::f64, {1}, "squared_norms")
                                            : squared_norms(builder, gradients, "squared_norms");
  if (!has_layout) return squares;
  const ValueId sum = squared_norm_sum(builder, squares, "squared_norm");
  all_reduce(builder, {{sum}}, {.group = RankGroup::world});
  return sum;
}

}  // namespace troupe
