#include "parallel/rank_communicators.h"

namespace troupe {

Communicators communicators_of(ProcessGroup& group, const Layout& layout, int32_t rank) {
  TROUPE_CHECK(group.size() == layout.world_size(), "the group is the layout's");
  Communicators communicators;
  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    const std::vector<int32_t> members = layout.members(kind, rank);
    if (members.size() > 1) communicators.of(kind) = &group.member(rank, members);
  }
  return communicators;
}

Communicators communicators_of(ProcessGroup* group, const Layout& layout, int32_t rank) {
  return group == nullptr ? Communicators{} : communicators_of(*group, layout, rank);
}

}  // namespace troupe
