// Ranks as threads: sums in a fixed order, and every way in which a rank can fail the others.
#include "comm/thread_group.h"

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "program/shard.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "support/rank_program.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

// Long against the pauses of a busy machine; short where the limit is meant to pass.
constexpr milliseconds kThreadLimit{60'000};
constexpr milliseconds kShort{200};

double draw(int rank, int tensor, int64_t i) {
  return random_normal(3, RandomStream::test, static_cast<uint32_t>(10 * rank + tensor),
                       static_cast<uint64_t>(i));
}

std::string failure_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::failed);
    return error.what();
  }
  ADD_FAILURE() << "nothing failed";
  return {};
}

class Sums : public ::testing::TestWithParam<int> {};

// 40003 elements are several blocks and chunks with a ragged end; 3 are fewer than the ranks'
// lines.
TEST_P(Sums, AreThoseInAscendingOrderOfRanksOnEveryRank) {
  const int ranks = GetParam();
  const std::vector<int64_t> sizes = {40003, 1, 3, 1024};
  const RankProgram program(sizes);
  for (const int threads : {1, 2}) {
    ThreadGroup group(ranks, kThreadLimit);
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, program, threads);
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (size_t t = 0; t < sizes.size(); ++t) {
          auto* data = mine.interpreter.view(program.metrics[t]).as<double>();
          for (int64_t i = 0; i < sizes[t]; ++i) data[i] = draw(rank, static_cast<int>(t), i);
        }
        for (int32_t i = 0; i < 5; ++i) {
          mine.interpreter.view(program.counts).as<int32_t>()[i] = 10 * (rank + 1) + i;
          mine.interpreter.view(program.previous).as<int32_t>()[i] = 1000 * i;
        }
        if (rank % 2 == repeat % 2) std::this_thread::sleep_for(milliseconds(2));
        mine.interpreter.run();
        for (size_t t = 0; t < sizes.size(); ++t) {
          const auto* data = mine.interpreter.view(program.metrics[t]).as<double>();
          for (int64_t i = 0; i < sizes[t]; ++i) {
            double sum = draw(0, static_cast<int>(t), i);
            for (int r = 1; r < ranks; ++r) sum += draw(r, static_cast<int>(t), i);
            ASSERT_EQ(data[i], sum) << "rank " << rank << " tensor " << t << " element " << i;
          }
        }
        for (int32_t i = 0; i < 5; ++i) {
          int32_t running = 0;
          int32_t total = 0;
          for (int r = 0; r < ranks; ++r) {
            total += 10 * (r + 1) + i;
            if (r <= rank) running += 10 * (r + 1) + i;
          }
          const auto sum = [&](size_t which) {
            return mine.interpreter.view(program.sums[which]).as<int32_t>()[i];
          };
          ASSERT_EQ(sum(0), running);
          ASSERT_EQ(sum(1), total);
          ASSERT_EQ(sum(2), running + 1000 * i);
          ASSERT_EQ(sum(3), total + 1000 * i);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Sums, ::testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

// 40003 rows of 3 are several blocks; 1 and 2 rows are fewer than the ranks. The second tensor is
// the last rank's alone.
TEST_P(Sums, OfShardsAreThoseOfAllAndEveryRankGathersThem) {
  const int ranks = GetParam();
  const std::vector<Shape> shapes = {{40003, 3}, {1, 5}, {2, 2, 3}, {7}};
  const std::vector<int16_t> owners = {-1, static_cast<int16_t>(ranks - 1)};
  ThreadGroup group(ranks, kThreadLimit);
  run_ranks(group, [&](int rank) {
    Communicator& communicator = group.member(rank);
    ThreadPool pool(2);
    std::vector<std::vector<double>> data;
    std::vector<TensorView> views;
    for (size_t t = 0; t < shapes.size(); ++t) {
      auto& tensor = data.emplace_back(static_cast<size_t>(shapes[t].elements()));
      for (size_t i = 0; i < tensor.size(); ++i) {
        tensor[i] = draw(rank, static_cast<int>(t), static_cast<int64_t>(i));
      }
    }
    for (size_t t = 0; t < shapes.size(); ++t) {
      views.push_back({.data = data[t].data(), .dtype = DType::f64, .shape = shapes[t]});
    }
    const auto sum = [&](size_t t, size_t i) {
      double sum = draw(0, static_cast<int>(t), static_cast<int64_t>(i));
      for (int r = 1; r < ranks; ++r) sum += draw(r, static_cast<int>(t), static_cast<int64_t>(i));
      return sum;
    };
    communicator.reduce_shards({}, views, owners, pool);
    for (size_t t = 0; t < shapes.size(); ++t) {
      const IndexRange own =
          shard_of(shapes[t], {.place = rank, .count = ranks, .owner = owner_of(owners, t)});
      for (size_t i = 0; i < data[t].size(); ++i) {
        const auto at = static_cast<int64_t>(i);
        const bool is_own = own.begin <= at && at < own.end;
        ASSERT_EQ(data[t][i], is_own ? sum(t, i) : draw(rank, static_cast<int>(t), at))
            << "rank " << rank << " tensor " << t << " element " << i;
      }
    }
    communicator.gather_shards({}, views, owners, pool);
    for (size_t t = 0; t < shapes.size(); ++t) {
      for (size_t i = 0; i < data[t].size(); ++i) {
        ASSERT_EQ(data[t][i], sum(t, i)) << "rank " << rank << " tensor " << t << " element " << i;
      }
    }
  });
}

TEST(Shards, CoverWholeRowsOnce) {
  for (const Shape& shape : {Shape{5, 3}, Shape{2, 3, 4}, Shape{7}, Shape{1, 9}, Shape{1}}) {
    const int64_t row = shape.rank() > 1 ? shape.back() : 1;
    for (const int32_t count : {1, 2, 3, 8}) {
      int64_t end = 0;
      for (int32_t place = 0; place < count; ++place) {
        const IndexRange shard = shard_of(shape, {place, count});
        EXPECT_EQ(shard.begin, end);
        EXPECT_EQ(shard.begin % row, 0);
        EXPECT_LE(shard.end - shard.begin, (shape.elements() / row + count - 1) / count * row);
        end = shard.end;
      }
      EXPECT_EQ(end, shape.elements());
    }
  }
}

TEST(AllReduce, SumsMainGradientsInSinglePrecision) {
  auto table = std::make_shared<StateTable>();
  const StateId gradient =
      table->add({.name = "d_w", .dtype = DType::f32, .shape = {33}, .role = Role::gradient});
  Program program(table);
  Builder builder(program);
  const ValueId value = builder.state(gradient);
  all_reduce(builder, std::array{value}, {});
  ThreadGroup group(2, kThreadLimit);
  run_ranks(group, [&](int rank) {
    StateStorage storage(table);
    ThreadPool pool(1);
    CpuInterpreter interpreter(program, plan_memory(program, 1), storage, pool,
                               of_all_ranks(group, rank));
    auto* data = storage.view(gradient).as<float>();
    for (int i = 0; i < 33; ++i) data[i] = static_cast<float>(i + 100 * rank);
    interpreter.run();
    for (int i = 0; i < 33; ++i) ASSERT_EQ(data[i], static_cast<float>(2 * i + 100));
  });
}

TEST(ProcessGroup, ExchangesNumbers) {
  ThreadGroup group(3, kThreadLimit);
  run_ranks(group, [&](int rank) {
    for (uint64_t round = 0; round < 50; ++round) {
      const auto values = group.exchange(rank, 100 * round + static_cast<uint64_t>(rank));
      ASSERT_EQ(values, (std::vector<uint64_t>{100 * round, 100 * round + 1, 100 * round + 2}));
    }
  });
}

// A rank that comes too late ends all, itself too, with one message that says where and who.
// A rank may end as soon as it has received, before the sender has noticed.
TEST(ProcessGroup, MessageToARankThatEndsAtOnceArrives) {
  ThreadGroup group(2, kThreadLimit);
  for (int round = 0; round < 200; ++round) {
    std::array<double, 2> numbers = {static_cast<double>(round), 0};
    const auto view = [&](int rank) {
      return TensorView{
          .data = &numbers[static_cast<size_t>(rank)], .dtype = DType::f64, .shape = Shape({1})};
    };
    run_ranks(group, [&](int rank) {
      Communicator& communicator = group.member(rank);
      if (rank == 1) {
        communicator.receive({}, view(1), 0);
        return;
      }
      communicator.send({}, view(0), 1);
      communicator.finish_send({}, 1);
    });
    ASSERT_EQ(numbers[1], round);
  }
}

TEST(FaultDrill, DelayedRank) {
  const RankProgram program({7});
  ThreadGroup group(3, kShort);
  std::array<std::string, 3> messages;
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, program);
      if (rank == 1) std::this_thread::sleep_for(kShort * 5 / 2);
      try {
        mine.interpreter.run();
      } catch (const UserError& error) {
        messages[static_cast<size_t>(rank)] = error.what();
        throw;
      }
    });
  });
  for (const std::string& of_rank : messages) EXPECT_EQ(of_rank, message);
  EXPECT_NE(message.find("operation 0 (prefix_sum), layer 2, micro-batch 1"), std::string::npos)
      << message;
  EXPECT_NE(message.find("0.2 s"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 1 (is missing, last seen in no operation)"), std::string::npos)
      << message;
}

// Of a group of some ranks messages name those of the run.
TEST(FaultDrill, RankOfASmallerGroupThatEnds) {
  ThreadGroup group(4, kThreadLimit);
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      if (rank != 1) return;
      std::array<int32_t, 1> counts = {};
      const TensorView view{counts.data(), DType::i32, {1}, nullptr};
      group.member(rank, {1, 3}).prefix_sum({}, view, view, view);
    });
  });
  EXPECT_NE(message.find("Rank 1 cannot go on"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 3 (has ended"), std::string::npos) << message;
}

// Of a wait for one rank only that one is named: for the receiver of a message, or for its sender.
TEST(FaultDrill, PartnerOfAMessageThatEnds) {
  for (const bool sends : {true, false}) {
    ThreadGroup group(3, kThreadLimit);
    const std::string message = failure_of([&] {
      run_ranks(group, [&](int rank) {
        if (rank == 0) return;
        double number = 1;
        const TensorView view{&number, DType::f64, {1}, nullptr};
        if (rank == 2 && sends) {
          group.member(rank).send({}, view, 0);
          group.member(rank).finish_send({}, 0);
        } else {
          group.member(rank).receive({}, view, rank == 2 ? 0 : 2);
        }
      });
    });
    EXPECT_EQ(message.substr(message.find(' ', 5)),
              " cannot go on in no operation, waiting for: rank 0 (has ended, last seen in no "
              "operation). All ranks end.");
  }
}

TEST(ProcessGroup, GathersTextsAtRank0) {
  ThreadGroup group(3, kThreadLimit);
  run_ranks(group, [&](int rank) {
    for (const char round : {'a', 'b'}) {
      const auto found = group.gather(rank, std::string(static_cast<size_t>(rank) + 1, round));
      ASSERT_EQ(found, rank == 0
                           ? (std::vector<std::string>{std::string(1, round), std::string(2, round),
                                                       std::string(3, round)})
                           : std::vector<std::string>());
    }
  });
  EXPECT_EQ(group.ranks_of_machine(), (std::vector<int32_t>{0, 1, 2}));
}

TEST(FaultDrill, RankThatThrows) {
  const RankProgram program({7});
  ThreadGroup group(4, kThreadLimit);
  std::atomic<int> cancelled{0};
  const auto drill = [&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, program);
      if (rank == 2) throw std::runtime_error("the disk of rank 2 is full");
      try {
        mine.interpreter.run();
      } catch (...) {
        ++cancelled;
        throw;
      }
    });
  };
  EXPECT_THROW(
      {
        try {
          drill();
        } catch (const std::runtime_error& error) {
          EXPECT_STREQ(error.what(), "the disk of rank 2 is full");
          throw;
        }
      },
      std::runtime_error);
  EXPECT_EQ(cancelled, 3);
}

TEST(FaultDrill, RankThatEndsEarly) {
  const RankProgram program({7});
  ThreadGroup group(2, kThreadLimit);
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, program);
      mine.interpreter.run();
      if (rank == 0) mine.interpreter.run();
    });
  });
  EXPECT_NE(message.find("rank 1 (has ended, last seen in operation 2 (all_reduce)"),
            std::string::npos)
      << message;
}

TEST(FaultDrill, MismatchedSize) {
  const RankProgram program({7});
  const RankProgram other({8});
  ThreadGroup group(3, kThreadLimit);
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, rank == 2 ? other : program);
      mine.interpreter.run();
    });
  });
  EXPECT_NE(
      message.find("rank 0 is in operation 2 (all_reduce), layer 2, micro-batch 1 of f64 [7]"),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("rank 2 in operation 2 (all_reduce), layer 2, micro-batch 1 of f64 [8]"),
            std::string::npos)
      << message;
}

// As many elements of another type, in a collective and in a message.
TEST(FaultDrill, MismatchedType) {
  std::array<double, 2> numbers = {1, 2};
  const auto view = [&](int rank) {
    return TensorView{.data = &numbers[static_cast<size_t>(rank)],
                      .dtype = rank == 0 ? DType::f64 : DType::f32,
                      .shape = Shape({1})};
  };
  ThreadGroup group(2, kThreadLimit);
  std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      ThreadPool pool(1);
      const TensorView own = view(rank);
      group.member(rank).all_reduce({}, {&own, 1}, pool);
    });
  });
  EXPECT_NE(message.find("rank 0 is in no operation of f64 [1], rank 1 in no operation of f32 [1]"),
            std::string::npos)
      << message;
  ThreadGroup others(2, kThreadLimit);
  message = failure_of([&] {
    run_ranks(others, [&](int rank) {
      Communicator& communicator = others.member(rank);
      if (rank == 1) return communicator.receive({}, view(1), 0);
      communicator.send({}, view(0), 1);
      communicator.finish_send({}, 1);
    });
  });
  EXPECT_NE(message.find("Rank 0 sends f64 [1] in no operation, but rank 1 receives f32 [1]"),
            std::string::npos)
      << message;
}

TEST(FaultDrill, CollectiveLeftOut) {
  const RankProgram program({7});
  const RankProgram other({7}, /*scan=*/false);
  ThreadGroup group(2, kThreadLimit);
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, rank == 1 ? other : program);
      mine.interpreter.run();
    });
  });
  EXPECT_NE(message.find("do not run the same collective"), std::string::npos) << message;
  EXPECT_NE(message.find("rank 1 in operation 0 (all_reduce)"), std::string::npos) << message;
}

// One rank goes on to the end of the step, the other has one more collective.
TEST(FaultDrill, StepThatEndsEarlier) {
  const RankProgram program({7});
  ThreadGroup group(2, kThreadLimit);
  const std::string message = failure_of([&] {
    run_ranks(group, [&](int rank) {
      Rank mine(group, rank, program);
      if (rank == 1) mine.interpreter.run();
      group.exchange(rank, 0);
    });
  });
  EXPECT_NE(message.find("rank 0 is in no operation, rank 1 in operation 0 (prefix_sum)"),
            std::string::npos)
      << message;
}

// A thread cannot be stopped from outside: the process ends, with the message of who waited.
TEST(FaultDrillDeathTest, RankThatNeverComesBack) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const RankProgram program({7});
        ThreadGroup group(2, kShort);
        run_ranks(group, [&](int rank) {
          Rank mine(group, rank, program);
          while (rank == 1) std::this_thread::sleep_for(milliseconds(50));
          mine.interpreter.run();
        });
      },
      ::testing::ExitedWithCode(1), "operation 0 \\(prefix_sum\\).*rank 1 \\(is missing");
}

}  // namespace
}  // namespace troupe
