// What the ranks of a run agree on before they begin.
#include "train/rank_session.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/thread_group.h"
#include "program/test_models.h"
#include "support/errors.h"

namespace troupe {
namespace {

// What each rank of one machine says of a program of 4 bytes to which that many others are added.
std::vector<std::string> said_of(const std::vector<uint64_t>& others) {
  const auto ranks = static_cast<int32_t>(others.size());
  std::vector<std::string> said(others.size());
  ThreadGroup group(ranks, std::chrono::seconds(60));
  const auto body = [&](int rank) {
    RankSession session({.ranks = ranks, .threads = ranks}, rank, &group);
    LayoutOptions options;
    options.world_size = ranks;
    auto partition = even_partition(1, 1, 1, StagePlacement::loop);
    session.declare(
        testing::dense_model(1), DType::f32, /*trained=*/false,
        std::make_shared<const RunLayout>(RunLayout{Layout(options), partition.value(), {}}));
    const Program program(session.state().table);
    const MemoryPlan plan = session.plan(program);
    try {
      session.check({{.program = &program, .memory = &plan}}, remedy_of_inference,
                    others[static_cast<size_t>(rank)]);
    } catch (const std::exception& error) {
      said[static_cast<size_t>(rank)] = error.what();
    }
  };
  // Ranks that wait for one that has ended fail.
  EXPECT_THROW(run_ranks(group, body), std::exception);
  return said;
}

TEST(RankSession, OneOfThoseThatNeedMostSaysThatTheMemoryIsTooSmall) {
  constexpr uint64_t kHuge = uint64_t{1} << 50;
  for (const auto& [others, speaker] : std::vector<std::pair<std::vector<uint64_t>, size_t>>{
           {{kHuge, kHuge, kHuge}, 0}, {{0, kHuge, kHuge}, 1}, {{0, kHuge, 2 * kHuge}, 2}}) {
    const std::vector<std::string> said = said_of(others);
    for (size_t rank = 0; rank < said.size(); ++rank) {
      EXPECT_EQ(said[rank].starts_with("The run needs"), rank == speaker) << said[rank];
    }
    testing::expect_phrase(said[speaker], "TiB for 3 ranks, this machine has ");
    testing::expect_phrase(said[speaker], "; of rank " + std::to_string(speaker));
  }
}

}  // namespace
}  // namespace troupe
