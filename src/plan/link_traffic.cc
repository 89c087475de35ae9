#include "plan/link_traffic.h"

#include <array>
#include <fmt/format.h>

#include "base/units.h"

namespace troupe {

LinkTraffic link_traffic(const OpView& op, int32_t ranks) {
  if (op.op.spec->links == nullptr || ranks < 2) return {};
  return op.op.spec->links(op, ranks);
}

std::vector<GroupTraffic> link_traffic(const Program& program, const Layout& layout, int32_t rank) {
  std::array<GroupTraffic, kRankGroupCount> groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].group = static_cast<RankGroup>(i);
    groups[i].ranks = layout.place_in(groups[i].group, rank).ranks;
  }
  const Program expected = program.with_expected_rows();
  for (int32_t index = 0; index < expected.op_count(); ++index) {
    const Op& op = expected.op(index);
    if (op.spec->group == nullptr) continue;
    GroupTraffic& group = groups[static_cast<size_t>(op.spec->group(op.attributes))];
    const LinkTraffic sent = link_traffic(OpView{expected, op}, group.ranks);
    if (sent.messages == 0) continue;
    group.operations += 1;
    group.sent.bytes += sent.bytes;
    group.sent.messages += sent.messages;
  }
  std::vector<GroupTraffic> used;
  for (const GroupTraffic& group : groups) {
    if (group.operations > 0) used.push_back(group);
  }
  return used;
}

std::string text_of(std::span<const GroupTraffic> traffic) {
  std::vector<std::string> parts;
  for (const GroupTraffic& group : traffic) {
    parts.push_back(fmt::format("{} of {} ranks {} in {} messages", name_of(group.group),
                                group.ranks, format_bytes(static_cast<uint64_t>(group.sent.bytes)),
                                format_count(group.sent.messages)));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace troupe
