#include "parallel/process_group.h"

#include <numeric>
#include <utility>

namespace troupe {

ProcessGroup::ProcessGroup(int size, std::chrono::milliseconds limit,
                           std::vector<int32_t> own_ranks, std::vector<int32_t> ranks_of_machine)
    : size_(size),
      limit_(limit),
      own_ranks_(std::move(own_ranks)),
      ranks_of_machine_(std::move(ranks_of_machine)) {
  TROUPE_CHECK(size >= 1 && !own_ranks_.empty(), "a group has a member");
}

Communicator& ProcessGroup::member(int rank) {
  return member(rank, ranks_below(size_));
}

void run_ranks(ProcessGroup& group, const std::function<void(int)>& body) {
  group.run(body);
}

std::vector<int32_t> ranks_below(int size) {
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace troupe
