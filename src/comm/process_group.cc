#include "comm/process_group.h"

#include <numeric>
#include <utility>

#include "comm/collective_messages.h"

namespace troupe {

ProcessGroup::ProcessGroup(std::chrono::milliseconds limit, std::vector<int32_t> own_ranks,
                           std::vector<int32_t> machine_of_rank)
    : size_(static_cast<int>(machine_of_rank.size())),
      limit_(limit),
      own_ranks_(std::move(own_ranks)),
      machine_of_rank_(std::move(machine_of_rank)) {
  TROUPE_CHECK(size_ >= 1 && !own_ranks_.empty(), "a group has a member");
  const int32_t machine = machine_of_rank_[static_cast<size_t>(own_ranks_.front())];
  for (int32_t rank = 0; rank < size_; ++rank) {
    if (machine_of_rank_[static_cast<size_t>(rank)] == machine) ranks_of_machine_.push_back(rank);
  }
}

std::string ProcessGroup::name_of_rank(int32_t rank) const {
  return rank_name(rank, {});
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
