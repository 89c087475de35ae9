#include "passes/amax_histories.h"

#include <cmath>
#include <string>

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/optimizer/accumulate/accumulate.h"

namespace troupe {
namespace {

constexpr int32_t kGradientKind = kHistoryKinds - 1;

}  // namespace

void AmaxHistories::add(const MapOperand& slot) {
  Shared& shared = shared_of(slot.experts);
  const auto [found, is_new] = shared.columns.try_emplace(history_of(slot).index);
  if (!is_new) return;
  shared.histories.push_back(history_of(slot));
  const int64_t matrices = program_.state()[history_of(slot)].shape[0];
  for (int32_t kind = 0; kind < kHistoryKinds; ++kind) {
    int64_t& count = shared.count[kind == kGradientKind ? 1 : 0];
    found->second.column[static_cast<size_t>(kind)] = count;
    count += matrices;
  }
}

ValueId AmaxHistories::amax(const MapOperand& slot) {
  const auto [found, is_new] = used_.try_emplace(history_of(slot).index);
  if (is_new) {
    const DelayedAmaxAttributes attributes{.most_recent = options_.amax == AmaxChoice::most_recent,
                                           .experts = slot.experts,
                                           .factor = std::ldexp(1.0F, options_.margin)};
    found->second = rewrite_.insert_before(0, Place{}, [&](Builder& builder) {
      return delayed_amax(builder, builder.state(history_of(slot)), attributes);
    });
  }
  return found->second[static_cast<size_t>(slot.kind)];
}

void AmaxHistories::note(const std::vector<MapOperand>& slots, ValueId amax) {
  for (const MapOperand& slot : slots) noted_.push_back({slot, amax});
}

ValueId AmaxHistories::metric_of(Builder& builder, bool experts, bool backward) {
  Shared& shared = shared_of(experts);
  const size_t which = backward ? 1 : 0;
  if (!shared.metrics[which].valid()) {
    const std::string name = backward ? "gradient_amax" : "operand_amax";
    shared.metrics[which] =
        builder.metric(name + (experts ? "_of_experts" : ""), DType::f64, {1, shared.count[which]});
  }
  return shared.metrics[which];
}

void AmaxHistories::record_before(int32_t index) {
  rewrite_.insert_before(index, program_.op(index).place, [&](Builder& builder) {
    for (const auto& [slot, amax] : noted_) {
      const ValueId metric = metric_of(builder, slot.experts, slot.kind == kGradientKind);
      const auto& columns = shared_of(slot.experts).columns.at(history_of(slot).index).column;
      const bool is_first = recorded_.emplace(history_of(slot).index, slot.kind).second;
      accumulate_largest_at(builder, metric, amax, columns[static_cast<size_t>(slot.kind)],
                            /*overwrite=*/is_first);
    }
    return noted_.size();
  });
  noted_.clear();
}

// [ranks, n]
ValueId AmaxHistories::over_ranks(Builder& builder, ValueId metric, bool experts) const {
  const std::string name = builder.value(metric).name + "_of_ranks";
  const auto gather = [&](ValueId own, RankGroup group, int32_t ranks) {
    return ranks == 1 ? own : all_gather(builder, own, {.group = group, .ranks = ranks}, name);
  };
  if (!experts) {
    return gather(metric, RankGroup::tp_dp_cp, layout_.tp() * layout_.dp() * layout_.cp());
  }
  const ValueId of_slices = gather(metric, RankGroup::etp, layout_.etp());
  return gather(of_slices, RankGroup::edp, layout_.edp());
}

void AmaxHistories::update() {
  const Place place{.phase = Phase::optimizer};
  rewrite_.insert_before(last_op_, place, [&](Builder& builder) {
    for (const bool experts : {false, true}) {
      const Shared& shared = shared_of(experts);
      if (shared.histories.empty()) continue;
      const ValueId forward = over_ranks(builder, metric_of(builder, experts, false), experts);
      const ValueId backward = over_ranks(builder, metric_of(builder, experts, true), experts);
      for (const StateId history : shared.histories) {
        amax_history_update(builder, builder.state(history), forward, backward, skip_,
                            shared.columns.at(history.index));
      }
    }
    return 0;
  });
}

}  // namespace troupe
