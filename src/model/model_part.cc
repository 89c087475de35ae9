#include "model/model_part.h"

#include <algorithm>
#include <utility>

namespace troupe {

RunLayout layout_of_one_rank(int32_t layers, int32_t mtp_layers) {
  PipelinePartition partition = even_partition(layers, 1, 1, StagePlacement::loop).value();
  partition.stages.back().mtp_layers = mtp_layers;
  return {.layout = Layout({.embedding_places = {0}}),
          .partition = std::move(partition),
          .schedule = {}};
}

StagedGroups ModelPart::staged_groups() const {
  StagedGroups staged{};
  for (size_t i = 0; i < kRankGroupCount; ++i) {
    if (!run->is_staged[i]) continue;
    const size_t ranks = layout().members(static_cast<RankGroup>(i), rank).size();
    if (ranks > 1) staged[i] = static_cast<int32_t>(ranks);
  }
  return staged;
}

Shard ModelPart::shard(GradientClass gradient) const {
  if (run->sharding == StateSharding::none) return {};
  const std::vector<int32_t> ranks = layout().members(shard_groups(gradient).within, rank);
  return {
      .place = static_cast<int32_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin()),
      .count = static_cast<int32_t>(ranks.size())};
}

}  // namespace troupe
