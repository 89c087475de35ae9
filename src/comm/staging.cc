#include "comm/staging.h"

#include <algorithm>

#include "base/error.h"

namespace troupe {
namespace {

int64_t largest_share(const ShareOf& share, int ranks) {
  int64_t largest = 0;
  for (int place = 0; place < ranks; ++place) {
    const IndexRange range = share(place);
    largest = std::max(largest, range.end - range.begin);
  }
  return largest;
}

}  // namespace

IndexRange part_of(const StagedTerms& terms, const IndexRange& share) {
  return {std::min(share.end, share.begin + terms.first),
          std::min(share.end, share.begin + terms.first + terms.elements)};
}

std::vector<std::vector<StagedTerms>> staged_rounds(std::span<const ShareOf> tensors, DType dtype,
                                                    int ranks) {
  const auto size = static_cast<int64_t>(size_of(dtype));
  const int64_t unit = kStagingAlignment / size;  // elements
  std::vector<std::vector<StagedTerms>> rounds;
  int64_t used = kMostStagedTerms;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const int64_t share = largest_share(tensors[tensor], ranks);
    for (int64_t first = 0; first < share;) {
      int64_t room = (kMostStagedTerms - used) / (ranks * kStagingAlignment) * unit;
      if (room == 0) {
        rounds.emplace_back();
        used = 0;
        room = kMostStagedTerms / (ranks * kStagingAlignment) * unit;
        TROUPE_CHECK(room > 0, "too many ranks for a round");
      }
      const int64_t elements = std::min(share - first, room);
      const int64_t stride = align_staging(elements * size);
      rounds.back().push_back({.tensor = tensor,
                               .first = first,
                               .elements = elements,
                               .offset = used,
                               .stride = stride});
      used += ranks * stride;
      first += elements;
    }
  }
  return rounds;
}

uint64_t staged_sum_bytes(std::span<const ShareOf> tensors, DType dtype, int ranks) {
  int64_t most = 0;
  for (const std::vector<StagedTerms>& round : staged_rounds(tensors, dtype, ranks)) {
    most = std::max(most, round.back().offset + ranks * round.back().stride);
  }
  return static_cast<uint64_t>(most);
}

uint64_t staged_sum_bytes(const OpView& op, int ranks,
                          const std::function<ShareOf(int output)>& share_of_output) {
  uint64_t most = 0;
  for (const DType dtype : kSummedDtypes) {
    std::vector<ShareOf> tensors;
    for (int i = 0; i < op.op.output_count; ++i) {
      if (op.output(i).dtype == dtype) tensors.push_back(share_of_output(i));
    }
    most = std::max(most, staged_sum_bytes(tensors, dtype, ranks));
  }
  return most;
}

// The same order of all ways for everyone.
std::vector<StagedWay> staged_ways(const std::vector<std::vector<int64_t>>& messages, int place) {
  std::vector<StagedWay> ways;
  const auto ranks = static_cast<int>(messages.size());
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (messages[static_cast<size_t>(from)][static_cast<size_t>(to)] == 0) continue;
      if (from == place || to == place) ways.push_back({from, to});
    }
  }
  return ways;
}

}  // namespace troupe
