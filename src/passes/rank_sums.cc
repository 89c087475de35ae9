#include "passes/rank_sums.h"

#include <functional>
#include <map>
#include <vector>

#include "ops/add/add.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/fill/fill.h"
#include "ops/gradient_norm/gradient_norm.h"
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

// The first of the ranks that hold this slice.
bool leads(const Parameter& parameter, const ModelPart& part) {
  const DensePlace dense = part.dense();
  switch (parameter.slice.gradient) {
    case GradientClass::expert:
      return part.expert().edp == 0;
    case GradientClass::replicated:
    case GradientClass::head_norm:
      return dense.dp == 0 && dense.cp == 0 && dense.tp == 0;
    case GradientClass::embedding:
      return dense.dp == 0 && dense.cp == 0 &&
             dense.pp == part.layout().options().embedding_places.front();
    case GradientClass::sliced:
      break;
  }
  return dense.dp == 0 && dense.cp == 0;
}

// Sums, over one group after the other, of the gradients of one layer.
class LayerSums {
 public:
  LayerSums(Builder& builder, const ModelPart& part) : builder_(builder), part_(part) {}

  void add(ValueId gradient, const Parameter& parameter) {
    const GradientReduction reduction = part_.layout().reduction_of(parameter.slice.gradient);
    if (reduction.partial) partial_[*reduction.partial].push_back(gradient);
    // One meeting for both where experts are spread as everything else.
    const Layout& layout = part_.layout();
    const bool alike = layout.members(reduction.replicas, part_.rank) ==
                       layout.members(RankGroup::dp_cp, part_.rank);
    replicas_[alike ? RankGroup::dp_cp : reduction.replicas].push_back(gradient);
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
        if (part_.layout().members(group, part_.rank).size() == 1) continue;
        all_reduce(builder_, gradients, {.group = group, .first_row = 0});
      }
    }
  }

 private:
  using Sums = std::map<RankGroup, std::vector<ValueId>>;
  Builder& builder_;
  const ModelPart& part_;
  Sums partial_;
  Sums replicas_;
  Sums copies_;
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
  std::vector<ValueId> whole;
  std::map<int64_t, std::vector<ValueId>> first_rows;  // by their number
  for (const Parameter& parameter : state.parameters) {
    if (!leads(parameter, state.part)) continue;
    const int64_t shared = first_shared_row(parameter, state.part);
    const bool leads_shared =
        shared == 0 ||
        state.part.layout().members(RankGroup::kv_replicas, state.part.rank).front() ==
            state.part.rank;
    (leads_shared ? whole : first_rows[shared]).push_back(builder.state(parameter.gradient));
  }
  ValueId sum;
  const auto add_squares = [&](const std::vector<ValueId>& gradients, int64_t rows) {
    const ValueId squares = squared_norm(builder, gradients, {.rows = rows}, "squared_norm");
    sum = sum.valid() ? add(builder, sum, squares, "squared_norms") : squares;
  };
  if (!whole.empty()) add_squares(whole, 0);
  for (const auto& [rows, gradients] : first_rows) add_squares(gradients, rows);
  if (state.part.layout().world_size() == 1) return sum;
  if (!sum.valid()) sum = fill(builder, 0, DType::f64, {1}, "squared_norm");
  return sum_over_ranks(builder, sum, {.group = RankGroup::world}, "squared_norm_of_all");
}

void sum_metrics_over_ranks(Builder& builder, const ModelState& state,
                            std::span<const ValueId> metrics) {
  if (state.part.layout().world_size() == 1) return;
  all_reduce(builder, metrics, {.group = RankGroup::world, .first_row = 0});
}

}  // namespace troupe
