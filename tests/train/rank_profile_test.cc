// Profiles of the ranks of a run: whose texts rank 0 gathers, and the timelines that ranks write.
#include "train/rank_profile.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "comm/thread_group.h"
#include "program/test_models.h"
#include "support/files.h"

namespace troupe::testing {
namespace {

// Runs `body` on each of that many ranks, with a session of it.
void on_ranks(int32_t ranks, const std::function<void(RankSession&)>& body) {
  if (ranks == 1) {
    RankSession session({.ranks = 1, .threads = 1}, 0, nullptr);
    return body(session);
  }
  ThreadGroup group(ranks, std::chrono::seconds(60));
  run_ranks(group, [&](int rank) {
    RankSession session({.ranks = ranks, .threads = ranks}, rank, &group);
    body(session);
  });
}

TEST(GatherFrom, RankZeroGetsThoseThatAreChosen) {
  using Texts = std::vector<std::string>;
  const auto gathered = [](int32_t ranks, const std::vector<int32_t>& chosen) {
    std::vector<Texts> all(static_cast<size_t>(ranks));
    on_ranks(ranks, [&](const RankSession& session) {
      all[static_cast<size_t>(session.rank())] =
          gather_from(session, chosen, "of " + std::to_string(session.rank()));
    });
    return all;
  };
  EXPECT_EQ(gathered(1, {0}), std::vector<Texts>{{"of 0"}});
  EXPECT_EQ(gathered(3, {1}), (std::vector<Texts>{{"of 1"}, {}, {}}));
  EXPECT_EQ(gathered(3, {2, 0}), (std::vector<Texts>{{"of 2", "of 0"}, {}, {}}));
}

// The texts of all ranks, by rank, and the names of the files.
struct Written {
  std::vector<WrittenTimelines> said;
  std::vector<std::string> files;
};

Written written(const TempFolder& folder, int32_t ranks, const std::vector<int32_t>& chosen,
                const std::string& name = "profile") {
  const Program program(std::make_shared<StateTable>());
  Written all{.said = std::vector<WrittenTimelines>(static_cast<size_t>(ranks)), .files = {}};
  on_ranks(ranks, [&](const RankSession& session) {
    StepProfile profile(program);
    profile.add({});
    all.said[static_cast<size_t>(session.rank())] =
        write_timelines(session, folder / name, 7, chosen, profile);
  });
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.is_regular_file()) all.files.push_back(entry.path().filename().string());
  }
  std::sort(all.files.begin(), all.files.end());
  return all;
}

TEST(WriteTimelines, OneRankHasOneFile) {
  for (const int32_t rank : {0, 1}) {
    const TempFolder folder;
    const Written found = written(folder, rank + 1, {rank});
    const std::string name = "rank" + std::to_string(rank);
    EXPECT_EQ(found.files, std::vector<std::string>{name + "_step7.json"});
    EXPECT_EQ(found.said[0].note, "step 7 of rank " + std::to_string(rank) + ": timeline in " +
                                      (folder / "profile/") + name + "_step7.json");
    for (const WrittenTimelines& each : found.said) EXPECT_EQ(each.fault, "");
    EXPECT_EQ(found.said.back().note.empty(), rank > 0) << "rank 0 speaks";
  }
}

TEST(WriteTimelines, SeveralRanksHaveOneOfAllBesides) {
  const TempFolder folder;
  const Written found = written(folder, 3, {0, 2});
  EXPECT_EQ(found.files,
            (std::vector<std::string>{"rank0_step7.json", "rank2_step7.json", "ranks_step7.json"}));
  const std::string in = folder / "profile/";
  EXPECT_EQ(found.said[0].note, "step 7 of the ranks 0, 2: timelines in " + in +
                                    "rank<R>_step7.json, all together in " + in +
                                    "ranks_step7.json");
  EXPECT_EQ(found.said[0].fault, "");
  const std::string together = get_file(in + "ranks_step7.json");
  EXPECT_NE(together.find("rank 0"), std::string::npos);
  EXPECT_NE(together.find("rank 2"), std::string::npos);
  EXPECT_EQ(together.find("rank 1"), std::string::npos);
}

// Whichever rank cannot write, rank 0 hears of it.
TEST(WriteTimelines, FaultsOfAllRanksAreHeard) {
  for (const int32_t rank : {0, 1}) {
    const TempFolder folder;
    put_file(folder / "file", "");
    const Written found = written(folder, 2, {rank}, "file/below");
    EXPECT_NE(found.said[0].fault.find(folder / "file"), std::string::npos) << found.said[0].fault;
    EXPECT_EQ(found.said[1].fault, "");
  }
}

}  // namespace
}  // namespace troupe::testing
