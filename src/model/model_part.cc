#include "model/model_part.h"

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
    const int32_t ranks = layout().place_in(static_cast<RankGroup>(i), rank).ranks;
    if (ranks > 1) staged[i] = ranks;
  }
  return staged;
}

Shard ModelPart::shard(GradientClass gradient) const {
  if (run->sharding == StateSharding::none) return {};
  const GroupPlace own = layout().place_in(shard_groups(gradient).within, rank);
  return {.place = own.place, .count = own.ranks};
}

}  // namespace troupe
