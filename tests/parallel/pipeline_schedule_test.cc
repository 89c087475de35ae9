// Schedules: idle time against the closed formulas of the papers, live micro-batches, completeness,
// and freedom from deadlocks, which a checker written once more here confirms.
#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "options/refusals.h"

namespace troupe {
namespace {

using Action = PipelineAction;

PipelineShape shape_of(PipelineSchedule schedule, int32_t ranks, int32_t chunks,
                       int32_t micro_batches, int32_t group_size = 0) {
  return {schedule, ranks, chunks, micro_batches, group_size};
}

PipelineShape plain(int32_t ranks, int32_t micro_batches) {
  return shape_of(PipelineSchedule::one_f_one_b, ranks, 1, micro_batches);
}

std::string describe(const PipelineShape& shape) {
  return std::string(name_of(shape.schedule)) + " ranks " + std::to_string(shape.ranks) +
         " chunks " + std::to_string(shape.chunks) + " micro-batches " +
         std::to_string(shape.micro_batches) + " group " + std::to_string(shape.group_size) +
         (shape.merged ? " merged" : "");
}

// Idle time of a rank, of all ranks the longest, counted over the whole step.
double idle_time(const PipelineShape& shape, const StageCost& cost) {
  const PipelineTimeline timeline = simulate(build_pipeline_table(shape), {cost});
  const double busy = (cost.forward + cost.data_gradient + cost.weight_gradient) *
                      shape.micro_batches * shape.chunks;
  // The share is of all ranks' time, and every rank has the same work.
  EXPECT_NEAR(timeline.bubble, 1 - busy / timeline.makespan, 1e-12) << describe(shape);
  return timeline.makespan - busy;
}

// Narayanan et al. 2021, section 2.2: (p - 1)(forward + backward). Sums of few small numbers: exact
// to rounding.
TEST(PipelineSchedule, OneForwardOneBackwardIdlesAsTheFormulaSays) {
  for (const int32_t p : {1, 2, 3, 4, 8}) {
    for (const int32_t m : {1, 2, p, 2 * p, 4 * p + 1}) {
      const StageCost cost{.forward = 1, .data_gradient = 1.25, .weight_gradient = 0.75};
      EXPECT_NEAR(idle_time(plain(p, m), cost), (p - 1) * 3.0, 1e-9) << p << " ranks, " << m;
    }
  }
}

// The same, section 2.2: interleaving divides it by the chunks, when p divides the micro-batches.
TEST(PipelineSchedule, InterleavingDividesTheIdleTimeByTheChunks) {
  for (const int32_t p : {2, 3, 4, 8}) {
    for (const int32_t chunks : {2, 3, 4}) {
      for (const int32_t rounds : {1, 2, 4}) {
        const PipelineShape shape = shape_of(PipelineSchedule::one_f_one_b, p, chunks, rounds * p);
        // A chunk has 1 / chunks of the rank's layers: with costs of one chunk the whole rank's
        // bubble (p - 1)(F + B) / chunks is (p - 1)(f + b).
        EXPECT_NEAR(idle_time(shape, {1, 1, 1}), (p - 1) * 3.0, 1e-9) << describe(shape);
      }
    }
  }
}

// Qi et al. 2024, table 1: (p - 1)(F + B - W), from p micro-batches on.
TEST(PipelineSchedule, ZeroBubbleH1IdlesAsTheFormulaSays) {
  for (const int32_t p : {1, 2, 3, 4, 8}) {
    for (const int32_t m : {p, p + 1, 2 * p, 5 * p}) {
      const PipelineShape shape = shape_of(PipelineSchedule::zb_h1, p, 1, m);
      EXPECT_NEAR(idle_time(shape, {1, 1, 1}), p - 1, 1e-9) << describe(shape);
    }
  }
}

// No schedule can do better than p - 1 forwards, for which the last rank waits at the start.
// DualPipeV without overlap has (p - 1)(F + B - 3 W) with B both gradients of a chunk, and F + B
// with it: 2 (p - 1).
TEST(PipelineSchedule, ZeroBubbleVIdlesLessThanDualPipeV) {
  for (const int32_t p : {2, 3, 4, 8, 16}) {
    for (const int32_t m : {p, 2 * p, 2 * p + 1, 5 * p}) {
      const PipelineShape shape = shape_of(PipelineSchedule::zb_v, p, 2, m);
      const double idle = idle_time(shape, {1, 1, 1});
      EXPECT_GE(idle, p - 1) << describe(shape);
      EXPECT_LT(idle, 2 * (p - 1)) << describe(shape);
    }
  }
}

TEST(PipelineSchedule, LiveMicroBatches) {
  for (const int32_t p : {2, 4, 8}) {
    for (const int32_t m : {1, 3, 2 * p, 5 * p}) {
      const auto flat = peak_live(build_pipeline_table(plain(p, m)));
      const auto h1 = peak_live(build_pipeline_table(shape_of(PipelineSchedule::zb_h1, p, 1, m)));
      const auto v = peak_live(build_pipeline_table(shape_of(PipelineSchedule::zb_v, p, 2, m)));
      for (int32_t rank = 0; rank < p; ++rank) {
        const auto r = static_cast<size_t>(rank);
        // 1F1B: p - r - 1 forwards to fill the pipeline and one more.
        EXPECT_EQ(flat[r], std::min(p - rank, m)) << "1f1b, rank " << rank << " of " << p;
        EXPECT_EQ(h1[r], std::min(p, m)) << "zb-h1, rank " << rank << " of " << p;
        EXPECT_LE(v[r], 2 * p) << "zb-v, chunks on rank " << rank << " of " << p;
      }
      if (m < p) continue;
      const auto deep = peak_live(
          build_pipeline_table(shape_of(PipelineSchedule::one_f_one_b, p, 3, m - m % p, p)));
      for (int32_t rank = 0; rank < p; ++rank) {
        const int32_t all = 3 * (m - m % p);
        EXPECT_EQ(deep[static_cast<size_t>(rank)], std::min(all, 2 * (p - rank - 1) + 2 * p + 1))
            << "interleaved, rank " << rank << " of " << p;
      }
    }
  }
}

// Megatron's order for groups of 2 micro-batches, written out.
TEST(PipelineSchedule, InterleavedOrderOfForwards) {
  const PipelineTable table =
      build_pipeline_table(shape_of(PipelineSchedule::one_f_one_b, 2, 2, 5, 3));
  std::vector<std::pair<int32_t, int32_t>> forwards;
  std::vector<std::pair<int32_t, int32_t>> backwards;
  for (const PipelineStep& step : table.ranks[1]) {
    if (step.action == Action::forward) forwards.emplace_back(step.micro_batch, step.chunk);
    if (step.action == Action::backward) backwards.emplace_back(step.micro_batch, step.chunk);
  }
  using Batches = std::vector<std::pair<int32_t, int32_t>>;
  EXPECT_EQ(
      forwards,
      (Batches{{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {2, 1}, {3, 0}, {4, 0}, {3, 1}, {4, 1}}));
  EXPECT_EQ(
      backwards,
      (Batches{{0, 1}, {1, 1}, {2, 1}, {0, 0}, {1, 0}, {2, 0}, {3, 1}, {4, 1}, {3, 0}, {4, 0}}));
}

// Runs all ranks at once and lets each take a step only when what it needs is there. Messages are
// kept by what they carry, and in the order in which they were sent.
void expect_sound(const PipelineTable& table) {
  const PipelineShape& shape = table.shape;
  const auto stage_of = [&](int32_t rank, int32_t chunk) {
    if (shape.schedule == PipelineSchedule::zb_v)
      return chunk == 0 ? rank : 2 * shape.ranks - 1 - rank;
    return chunk * shape.ranks + rank;
  };
  const int32_t last = shape.ranks * shape.chunks - 1;
  using Key = std::tuple<bool, int32_t, int32_t>;  // backward?, micro-batch, stage
  std::set<Key> done;
  std::map<Key, int> weight_gradients;
  std::map<std::pair<int32_t, int32_t>, std::vector<Key>> sent;
  std::map<std::pair<int32_t, int32_t>, size_t> taken;
  std::vector<std::set<Key>> here(static_cast<size_t>(shape.ranks));  // results at hand
  std::vector<size_t> next(static_cast<size_t>(shape.ranks), 0);
  bool progress = true;
  while (progress) {
    progress = false;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      while (next[r] < table.ranks[r].size()) {
        const PipelineStep& step = table.ranks[r][next[r]];
        const int32_t stage = stage_of(rank, step.chunk);
        const int32_t m = step.micro_batch;
        if (step.action == Action::forward) {
          if (stage > 0) {
            ASSERT_TRUE(here[r].contains({false, m, stage - 1})) << "no input";
          }
          ASSERT_TRUE(done.insert({false, m, stage}).second) << "forward twice";
          here[r].insert({false, m, stage});
        } else if (step.action == Action::backward || step.action == Action::data_gradient) {
          ASSERT_TRUE(here[r].contains({false, m, stage})) << "gradient before forward";
          if (stage < last) {
            ASSERT_TRUE(here[r].contains({true, m, stage + 1})) << "no gradient";
          }
          ASSERT_TRUE(done.insert({true, m, stage}).second) << "backward twice";
          here[r].insert({true, m, stage});
          if (step.action == Action::backward) ++weight_gradients[{true, m, stage}];
        } else if (step.action == Action::weight_gradient) {
          ASSERT_TRUE(here[r].contains({true, m, stage})) << "weight gradient before data gradient";
          ++weight_gradients[{true, m, stage}];
        } else if (step.action == Action::send_activation || step.action == Action::send_gradient) {
          const Key key{step.action == Action::send_gradient, m, stage};
          ASSERT_TRUE(here[r].contains(key)) << "sent before it was made";
          sent[{rank, step.peer}].push_back(key);
        } else {
          const bool gradient = step.action == Action::receive_gradient;
          const std::pair<int32_t, int32_t> way{step.peer, rank};
          if (taken[way] == sent[way].size()) break;
          const Key key{gradient, m, gradient ? stage + 1 : stage - 1};
          ASSERT_EQ(sent[way][taken[way]], key) << "received out of order";
          ++taken[way];
          here[r].insert(key);
        }
        ++next[r];
        progress = true;
      }
    }
  }
  for (size_t r = 0; r < next.size(); ++r) {
    ASSERT_EQ(next[r], table.ranks[r].size()) << "rank " << r << " waits forever";
  }
  for (const auto& [way, messages] : sent) ASSERT_EQ(taken[way], messages.size());
  const size_t all = static_cast<size_t>(shape.micro_batches) * static_cast<size_t>(last + 1);
  EXPECT_EQ(done.size(), 2 * all);
  EXPECT_EQ(weight_gradients.size(), all);
  for (const auto& [key, times] : weight_gradients) EXPECT_EQ(times, 1);
}

TEST(PipelineSchedule, RandomShapesAreCompleteAndCannotDeadlock) {
  uint64_t at = 0;
  const auto below = [&](int32_t bound) {
    return static_cast<int32_t>(
        random_below(static_cast<uint64_t>(bound), 11, RandomStream::test, 2, at++));
  };
  int built = 0;
  for (int i = 0; i < 1200; ++i) {
    PipelineShape shape;
    shape.schedule = static_cast<PipelineSchedule>(below(3));
    shape.ranks = 1 + below(8);
    shape.chunks = shape.schedule == PipelineSchedule::zb_v ? 2 : 1;
    shape.micro_batches = 1 + below(24);
    if (shape.schedule == PipelineSchedule::one_f_one_b) {
      shape.chunks = 1 + below(4);
      if (shape.chunks > 1) shape.group_size = below(12);
      shape.merged = below(2) == 1;
    }
    SCOPED_TRACE(describe(shape));
    if (check_shape(shape)) {
      // Megatron's rules, and those of the shapes.
      const int32_t group = shape.group_size > 0 ? shape.group_size : shape.ranks;
      const int32_t left = shape.micro_batches % group;
      const bool valid = shape.ranks >= 2 && group >= shape.ranks && group <= shape.micro_batches &&
                         (left == 0 || left >= shape.ranks);
      EXPECT_TRUE(shape.chunks > 1 &&
                  !(shape.schedule == PipelineSchedule::zb_v ? shape.ranks >= 2 : valid))
          << "a valid shape was refused";
      continue;
    }
    const PipelineTable table = build_pipeline_table(shape);
    ++built;
    EXPECT_EQ(find_fault(table), "");
    expect_sound(table);
    if (HasFailure()) break;
  }
  EXPECT_GT(built, 500);
}

// A pair is a forward and the backward right after it, of something else. With one more forward in
// flight (without chunks: twice as many and one) all backwards are in pairs, except as many as
// there are forwards in flight.
TEST(PipelineSchedule, MergedPairs) {
  for (const int32_t p : {1, 2, 4}) {
    for (const int32_t chunks : {1, 2}) {
      if (p == 1 && chunks > 1) continue;
      PipelineShape shape = shape_of(PipelineSchedule::one_f_one_b, p, chunks, 4 * p);
      shape.merged = true;
      const PipelineTable table = build_pipeline_table(shape);
      const std::vector<int32_t> live = peak_live(table);
      for (int32_t rank = 0; rank < p; ++rank) {
        const auto& steps = table.ranks[static_cast<size_t>(rank)];
        const int32_t warm_up = 2 * (p - rank - 1) + (chunks - 1) * p + 1;
        int32_t pairs = 0;
        for (size_t i = 0; i < steps.size(); ++i) {
          if (!steps[i].merged) continue;
          ++pairs;
          ASSERT_EQ(steps[i].action, Action::backward);
          ASSERT_EQ(steps[i - 1].action, Action::forward);
          const bool same = steps[i].micro_batch == steps[i - 1].micro_batch &&
                            steps[i].chunk == steps[i - 1].chunk;
          EXPECT_FALSE(same) << "a backward beside its own forward";
        }
        EXPECT_EQ(pairs, 4 * p * chunks - warm_up) << describe(shape) << " rank " << rank;
        EXPECT_EQ(live[static_cast<size_t>(rank)], warm_up + 1) << describe(shape);
      }
    }
  }
}

TEST(PipelineSchedule, VHasNoMessagesAtTheTurn) {
  const PipelineTable table = build_pipeline_table(shape_of(PipelineSchedule::zb_v, 4, 2, 8));
  for (const PipelineStep& step : table.ranks[3]) {
    if (is_compute(step.action)) continue;
    EXPECT_EQ(step.peer, 2) << "both stages of the last rank follow each other";
  }
}

// The checker is not blind.
TEST(PipelineSchedule, FaultsAreFound) {
  const PipelineTable sound = build_pipeline_table(plain(3, 4));
  const auto fault_after = [&](const auto& change) {
    PipelineTable table = sound;
    change(table);
    return find_fault(table);
  };
  const auto place = [](std::vector<PipelineStep>& steps, Action action) {
    return std::find_if(steps.begin(), steps.end(),
                        [&](const PipelineStep& step) { return step.action == action; });
  };
  const auto expect = [](const std::string& fault, const std::string& phrase) {
    EXPECT_NE(fault.find(phrase), std::string::npos)
        << "'" << phrase << "' not in '" << fault << "'";
  };
  expect(fault_after([&](PipelineTable& table) {
           table.ranks[0].erase(place(table.ranks[0], Action::send_activation));
         }),
         "receive activation of micro-batch 0, chunk 0 from rank 0: the next message");
  expect(fault_after([&](PipelineTable& table) {
           auto& steps = table.ranks[2];
           steps.erase(std::find_if(steps.rbegin(), steps.rend(),
                                    [](const PipelineStep& step) {
                                      return step.action == Action::send_gradient;
                                    })
                           .base() -
                       1);
         }),
         "waits forever");
  expect(fault_after([&](PipelineTable& table) {
           table.ranks[1].erase(place(table.ranks[1], Action::receive_gradient));
         }),
         "what it needs has not been received");
  expect(fault_after([&](PipelineTable& table) { table.ranks[0].pop_back(); }),
         "stage 0 never does the backward of micro-batch 3");
  expect(fault_after([&](PipelineTable& table) {
           table.ranks[0].insert(table.ranks[0].begin(), table.ranks[0].front());
         }),
         "it is done twice");
  expect(fault_after([&](PipelineTable& table) {
           std::reverse(table.ranks[2].begin(), table.ranks[2].end());
         }),
         "rank 2: send gradient of micro-batch 3");
  // In the last stage, whose backward needs nothing else.
  expect(fault_after([&](PipelineTable& table) {
           auto& steps = table.ranks[2];
           const auto backward = place(steps, Action::backward);
           std::rotate(steps.begin(), backward, backward + 1);
         }),
         "backward of micro-batch 0, chunk 0: it comes before the forward");
  // Whatever other ranks have received.
  for (const auto& [rank, action, phrase] :
       {std::tuple(0U, Action::send_activation, "rank 1: a message of micro-batch 0 for stage 1"),
        std::tuple(1U, Action::send_activation, "rank 2: a message of micro-batch 0 for stage 2"),
        std::tuple(2U, Action::send_gradient, "rank 1: a message of micro-batch 0 for stage 1")}) {
    expect(fault_after([&](PipelineTable& table) {
             auto& steps = table.ranks[rank];
             steps.push_back(*place(steps, action));
           }),
           std::string(phrase) + " is never received");
  }
  // Two ranks that each need the other's message first.
  expect(fault_after([&](PipelineTable& table) {
           auto& steps = table.ranks[0];
           const auto receive = place(steps, Action::receive_gradient);
           const PipelineStep step = *receive;
           steps.erase(receive);
           steps.insert(steps.begin(), step);
         }),
         "rank 0: receive gradient of micro-batch 0, chunk 0 from rank 1 waits forever");
}

TEST(PipelineSchedule, MessagesTakeTime) {
  const PipelineTable table = build_pipeline_table(plain(4, 1));
  const PipelineTimeline timeline = simulate(table, {{1, 1, 1}}, /*message=*/0.5);
  EXPECT_DOUBLE_EQ(timeline.makespan, 4 * 3.0 + 6 * 0.5)
      << "six messages stand one after the other";
}

// The slowest stage sets the pace: M times its work, and the others' once.
TEST(PipelineSchedule, UnevenStagesWaitForTheSlowest) {
  const PipelineTable table = build_pipeline_table(plain(3, 10));
  const PipelineTimeline timeline = simulate(table, {{1, 1, 1}, {1, 1, 1}, {2, 2, 2}});
  EXPECT_DOUBLE_EQ(timeline.makespan, 10 * 6.0 + 2 * 3.0);
}

TEST(PipelineSchedule, Picture) {
  const PipelineTable table = build_pipeline_table(plain(2, 2));
  EXPECT_EQ(draw(table, simulate(table, {StageCost{}})),
            "rank 0   F0 F1  .  . B0---  . B1---\n"
            "rank 1    . F0 B0--- F1 B1---\n");
}

TEST(PipelineSchedule, PictureIsAsWideAsTheLargestNumber) {
  const auto picture = [](int32_t micro_batches) {
    const PipelineTable table = build_pipeline_table(plain(2, micro_batches));
    return draw(table, simulate(table, {StageCost{}}));
  };
  EXPECT_TRUE(picture(10).starts_with("rank 0   F0 F1  .")) << picture(10);
  EXPECT_TRUE(picture(11).starts_with("rank 0   F0- F1-   .")) << picture(11);
  EXPECT_TRUE(picture(100).starts_with("rank 0   F0- F1-   .")) << picture(100);
}

void expect_refused(const PipelineShape& shape, const std::string& phrase) {
  const std::optional<Refusal> refusal = check_shape(shape);
  ASSERT_TRUE(refusal.has_value()) << describe(shape) << " was accepted";
  const std::string message = text_of(*refusal);
  EXPECT_NE(message.find(phrase), std::string::npos) << "'" << phrase << "' is not in: " << message;
}

TEST(PipelineSchedule, RefusalsNameTheRule) {
  using enum PipelineSchedule;
  expect_refused(shape_of(zb_h1, 4, 2, 8), "has one stage per rank, not 2");
  PipelineShape merged = shape_of(zb_h1, 4, 1, 8);
  merged.merged = true;
  expect_refused(merged, "zb-h1 has an order of its own");
  expect_refused(shape_of(zb_v, 4, 1, 8), "two stages on each of at least two ranks");
  expect_refused(shape_of(zb_v, 1, 2, 8), "two stages on each of at least two ranks");
  expect_refused(shape_of(one_f_one_b, 1, 2, 8), "--pipeline-model-parallel-size 2 or more");
  expect_refused(shape_of(one_f_one_b, 4, 1, 8, 4), "belongs to the interleaved schedule");
  expect_refused(shape_of(one_f_one_b, 4, 2, 3), "at least as many micro-batches");
  expect_refused(shape_of(one_f_one_b, 4, 2, 8, 3), "Nearest: 4.");
  expect_refused(shape_of(one_f_one_b, 4, 2, 10, 0), "Nearest: 5.");
}

}  // namespace
}  // namespace troupe
