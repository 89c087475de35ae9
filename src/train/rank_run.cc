#include "train/rank_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace troupe {

namespace {

// "--seed 6 instead of 5"; empty: nothing differs.
std::string describe_differences(const Options& expected, const Options& other) {
  if (expected.command != other.command) {
    return fmt::format("troupe {} instead of troupe {}", info_of(other.command).name,
                       info_of(expected.command).name);
  }
  constexpr size_t kNamed = 8;
  std::string text;
  const std::vector<OptionDifference> all = differences(expected, other);
  for (size_t i = 0; i < all.size() && i < kNamed; ++i) {
    text += fmt::format("{}--{} {} instead of {}", text.empty() ? "" : ", ", all[i].spec->name,
                        printable(all[i].after), printable(all[i].before));
  }
  if (all.size() > kNamed) text += fmt::format(" and {} others", all.size() - kNamed);
  return text;
}

}  // namespace

bool leads(const ProcessGroup* processes) {
  return processes == nullptr || processes->own_ranks().front() == 0;
}

void require_same_options(const Options& options, ProcessGroup& group, int32_t rank) {
  const std::vector<std::string> all = group.gather(rank, to_json(options));
  std::map<std::string, std::vector<int32_t>> ranks_of;  // by difference
  for (size_t other = 1; other < all.size(); ++other) {
    Options started = options;
    from_json(started, all[other], group.name_of_rank(static_cast<int32_t>(other)));
    const std::string difference = describe_differences(options, started);
    if (!difference.empty()) ranks_of[difference].push_back(static_cast<int32_t>(other));
  }
  std::string text;
  for (const auto& [difference, ranks] : ranks_of) {
    text += fmt::format("{}{} with {}", text.empty() ? "" : "; ",
                        ranks.size() == 1 ? group.name_of_rank(ranks.front())
                                          : fmt::format("ranks {}", fmt::join(ranks, ", ")),
                        difference);
  }
  if (!text.empty()) {
    throw_bad_request(fmt::format(
        "Not all ranks were started with the options of {}: {}. Give all ranks the same flags.",
        group.name_of_rank(0), text));
  }
  group.exchange(rank, 0);  // no rank begins before the verdict
}

}  // namespace troupe
