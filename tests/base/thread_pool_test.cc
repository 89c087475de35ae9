// The thread pool: every chunk once, whatever the numbers of chunks and threads. What the chunks
// write is not atomic, so the thread sanitizer sees it when a loop starts or ends too early.
#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <gtest/gtest.h>
#include <thread>
#include <vector>

namespace troupe {
namespace {

class Pool : public ::testing::TestWithParam<int> {
 protected:
  ThreadPool pool{GetParam()};
};

TEST_P(Pool, HasItsThreads) {
  EXPECT_EQ(pool.threads(), GetParam());
}

TEST_P(Pool, RunsEveryChunkOnce) {
  for (const int64_t chunks : {0, 1, 2, 3, 4, 5, 100, 1000}) {
    std::vector<int> runs(static_cast<size_t>(chunks));
    pool.parallel_for(chunks, [&](int64_t chunk, int worker) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, GetParam());
      ++runs[static_cast<size_t>(chunk)];
    });
    for (int64_t i = 0; i < chunks; ++i) {
      ASSERT_EQ(runs[static_cast<size_t>(i)], 1) << "chunk " << i << " of " << chunks;
    }
  }
}

TEST_P(Pool, NegativeCountsRunNothing) {
  pool.parallel_for(-1, [](int64_t, int) { FAIL(); });
  pool.parallel_ranges(0, 8, [](int64_t, int64_t, int) { FAIL(); });
  pool.parallel_ranges(-5, 8, [](int64_t, int64_t, int) { FAIL(); });
}

// Each loop reads what the one before has written.
TEST_P(Pool, LoopsFollowEachOther) {
  constexpr int64_t kChunks = 7;
  constexpr int kLoops = 5000;
  std::vector<int64_t> values(kChunks);
  std::vector<int64_t> next(kChunks);
  for (int loop = 0; loop < kLoops; ++loop) {
    pool.parallel_for(kChunks, [&](int64_t chunk, int) {
      const auto i = static_cast<size_t>(chunk);
      next[i] = values[(i + 1) % kChunks] + 1;
    });
    values.swap(next);
  }
  for (const int64_t value : values) EXPECT_EQ(value, kLoops);
}

// Long enough between two loops that the workers have gone to sleep.
TEST_P(Pool, WakesFromSleep) {
  for (int loop = 0; loop < 5; ++loop) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::vector<int> runs(16);
    pool.parallel_for(16, [&](int64_t chunk, int) { ++runs[static_cast<size_t>(chunk)]; });
    EXPECT_EQ(runs, std::vector<int>(16, 1));
  }
}

// A worker number belongs to one thread for the length of a loop: scratch memory by worker is safe.
TEST_P(Pool, WorkersAreDistinctThreads) {
  std::vector<int64_t> sums(static_cast<size_t>(GetParam()));
  pool.parallel_for(1000,
                    [&](int64_t chunk, int worker) { sums[static_cast<size_t>(worker)] += chunk; });
  int64_t total = 0;
  for (const int64_t sum : sums) total += sum;
  EXPECT_EQ(total, 1000 * 999 / 2);
}

TEST_P(Pool, RangesCoverEverythingOnce) {
  for (const int64_t count : {1, 7, 8, 9, 64, 1001}) {
    std::vector<int> seen(static_cast<size_t>(count));
    std::atomic<int> pieces{0};
    pool.parallel_ranges(count, 8, [&](int64_t begin, int64_t end, int) {
      EXPECT_EQ(begin % 8, 0);
      EXPECT_TRUE(end == begin + 8 || end == count);
      for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      ++pieces;
    });
    EXPECT_EQ(pieces.load(), (count + 7) / 8);
    EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(count), 1)) << count;
  }
}

TEST_P(Pool, ComesAndGoes) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool other(GetParam());
    std::atomic<int> runs{0};
    if (i % 2 == 0) other.parallel_for(3, [&](int64_t, int) { ++runs; });
    EXPECT_EQ(runs.load(), i % 2 == 0 ? 3 : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Pool, ::testing::Values(1, 2, 3, 4));

TEST(ThreadPoolDeathTest, NeedsAThread) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ThreadPool(0), "at least one thread");
}

}  // namespace
}  // namespace troupe
