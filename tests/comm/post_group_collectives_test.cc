// Ranks as processes over a post that does nothing before it must (lazy_post.h): what they compute
// is what threads compute, in the pieces that are promised.
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "comm/post/post_group.h"
#include "comm/thread_group.h"
#include "support/collective_cases.h"
#include "support/lazy_post.h"

namespace troupe {
namespace {

using testing::LazyTraffic;
using testing::run_collective_cases;
using testing::run_lazily;

class LazyRanks : public ::testing::TestWithParam<int> {};

TEST_P(LazyRanks, ComputeWhatThreadsCompute) {
  const int ranks = GetParam();
  std::vector<std::vector<std::string>> expected(static_cast<size_t>(ranks));
  ThreadGroup threads(ranks, std::chrono::seconds(60));
  run_ranks(threads, [&](int rank) {
    expected[static_cast<size_t>(rank)] = run_collective_cases(threads, rank, false);
  });
  run_lazily(ranks, 1, [&](int rank, PostGroup& group) {
    const std::vector<std::string> found = run_collective_cases(group, rank, false);
    const std::vector<std::string>& of_threads = expected[static_cast<size_t>(rank)];
    ASSERT_EQ(found.size(), of_threads.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(found[i] == of_threads[i])
          << "rank " << rank << " gets another result of case " << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LazyRanks, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(LazyPost, ExchangesNumbersAndGathersTexts) {
  run_lazily(3, 1, [](int rank, PostGroup& group) {
    for (uint64_t round = 0; round < 3; ++round) {
      EXPECT_EQ(group.exchange(rank, 10 * round + static_cast<uint64_t>(rank)),
                (std::vector<uint64_t>{10 * round, 10 * round + 1, 10 * round + 2}));
      const std::vector<std::string> texts = group.gather(
          rank, std::string(static_cast<size_t>(rank) * 7 % 3, static_cast<char>('a' + rank)));
      EXPECT_EQ(texts,
                rank == 0 ? (std::vector<std::string>{"", "b", "cc"}) : std::vector<std::string>());
    }
  });
}

// Memory is only taken for what comes: 16 MiB more at a time.
TEST(LazyPost, GathersInPiecesOf16MiB) {
  constexpr int64_t kPiece = int64_t{16} << 20;
  const auto bytes_of_rank = [](uint32_t rank) {
    std::string bytes(static_cast<size_t>(kPiece) + (rank == 2 ? 3 : 0), '\0');
    for (uint32_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<char>((i + rank) * 2654435761U >> 16);
    }
    return bytes;
  };
  const LazyTraffic traffic = run_lazily(3, 1, [&](int rank, PostGroup& group) {
    const std::vector<std::string> all =
        group.gather(rank, bytes_of_rank(static_cast<uint32_t>(rank)));
    ASSERT_EQ(all.size(), rank == 0 ? 3U : 0U);
    for (uint32_t from = 0; from < all.size(); ++from) {
      EXPECT_TRUE(all[from] == bytes_of_rank(from)) << "of rank " << from;
    }
  });
  EXPECT_EQ(traffic.received,
            (std::vector<LazyTraffic::Part>{{1, 0, kPiece}, {2, 0, kPiece}, {2, 0, 3}}));
}

// The terms of the others take 16 MiB in all, 8 of each of two.
TEST(LazyPost, SumsInRoundsFor16MiBOfTerms) {
  constexpr int64_t kRound = int64_t{8} << 20;
  constexpr int64_t kElements = kRound / 4 + 1;
  const LazyTraffic traffic = run_lazily(3, 1, [](int rank, PostGroup& group) {
    ThreadPool pool(1);
    std::vector<int32_t> own(3 * kElements);
    for (size_t i = 0; i < own.size(); ++i) {
      own[i] = static_cast<int32_t>(i) * (1 + rank) + 100 * rank;
    }
    std::vector<int32_t> result(kElements);
    group.member(rank).reduce_scatter({}, {own.data(), DType::i32, {3 * kElements}, nullptr},
                                      {result.data(), DType::i32, {kElements}, nullptr}, pool);
    int64_t wrong = 0;
    for (size_t i = 0; i < result.size(); ++i) {
      const auto at = static_cast<int32_t>(i) + static_cast<int32_t>(kElements) * rank;
      if (result[i] != 6 * at + 300) ++wrong;
    }
    EXPECT_EQ(wrong, 0) << "of rank " << rank;
  });
  for (int to = 0; to < 3; ++to) {
    std::vector<int64_t> sizes;
    for (const LazyTraffic::Part& each : traffic.received) {
      if (each.to == to) sizes.push_back(each.bytes);
    }
    EXPECT_EQ(sizes, (std::vector<int64_t>{kRound, kRound, 4, 4})) << "to rank " << to;
  }
}

// Which is copied in parts.
TEST(LazyPost, GathersItsOwnTensorWhole) {
  run_lazily(1, 1, [](int rank, PostGroup& group) {
    ThreadPool pool(2);
    constexpr int64_t kElements = 200'001;
    std::vector<int32_t> own(kElements);
    for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int32_t>(i) + 1;
    std::vector<int32_t> all(kElements);
    group.member(rank).all_gather({}, {own.data(), DType::i32, {kElements}, nullptr},
                                  {all.data(), DType::i32, {kElements}, nullptr}, pool);
    EXPECT_TRUE(own == all);
  });
}

}  // namespace
}  // namespace troupe
