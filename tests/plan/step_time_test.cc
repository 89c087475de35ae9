// The simulation of a step, against times that can be added up by hand.
#include "plan/step_time.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <string_view>
#include <vector>

#include "plan/link_traffic.h"
#include "plan/plan_test_support.h"

namespace troupe {
namespace {

TimedOperation compute(double seconds) {
  return {.seconds = seconds, .queue = Queue::compute, .part = TimePart::dense_products};
}

TimedOperation exchange(double seconds) {
  return {.seconds = seconds,
          .queue = Queue::communication,
          .part = TimePart::exchange,
          .group = RankGroup::etp_ep};
}

TimedOperation message(MessageUse::Action action, int32_t peer, double seconds) {
  return {.seconds = seconds,
          .queue = Queue::communication,
          .part = TimePart::exchange,
          .group = RankGroup::pp,
          .peer = peer,
          .action = action};
}

StepTime simulate(const std::vector<TimedProgram>& programs) {
  std::vector<const TimedProgram*> pointers;
  for (const TimedProgram& program : programs) pointers.push_back(&program);
  return simulate_step(pointers, /*launch_seconds=*/0);
}

double products_of(const StepTime& time) {
  return time.compute[static_cast<size_t>(TimePart::dense_products)];
}
double exposed_of(const StepTime& time, RankGroup group) {
  return time.exposed[static_cast<size_t>(group)];
}

// Of the bytes to each of the others, those over NVLink take half its bandwidth and the rest the
// network's, at the same time; every round has the latency of the slower.
TEST(TimeProgram, ExchangesTakeTheSlowerOfTwoLinks) {
  const auto program = testing::program_of(
      "--model mixtral-tiny --num-layers 1 --seq-length 16 --ranks 4 --expert-model-parallel-size "
      "4 "
      "--moe-token-dispatcher-type alltoall");
  const Program expected = program->with_expected_rows();
  const MemoryPlan memory = plan_memory(*program, 1);
  const Layout layout(LayoutOptions{.world_size = 4, .expert_parallel = 4});
  for (const int32_t near : {1, 3}) {
    for (const double network : {1e2, 1e6}) {
      GpuCluster cluster;
      cluster.gpus = 4;
      GpuModel& gpu = cluster.model;
      gpu.traits = {.compute_capability = 90, .multiprocessors = 132};
      gpu.bf16_flops = gpu.f32_flops = gpu.f64_flops = 1e30;
      gpu.memory_bandwidth = gpu.host_bandwidth = 1e30;
      gpu.gpus_per_node = 1;  // NVLink may join nodes
      gpu.gpus_per_nvlink = near + 1;
      gpu.nvlink_bandwidth = 1e3;
      gpu.nvlink_latency = 7;
      gpu.network_bandwidth = network;
      gpu.network_latency = 11;
      const TimedProgram timed = time_program(*program, memory, cluster, layout, /*rank=*/0);
      int exchanges = 0;
      for (int32_t index = 0; index < program->op_count(); ++index) {
        const Op& op = expected.op(index);
        if (op.spec->group == nullptr) continue;
        const LinkTraffic sent = link_traffic(OpView{expected, op}, 4);
        if (sent.bytes == 0) continue;
        ++exchanges;
        const double to_each = sent.bytes / 3;
        // Of NVLink's 1,000 bytes/s rows reach a half, all others 0.72.
        const bool has_rows = std::string_view(op.spec->name).ends_with("_rows");
        const double nvlink = has_rows ? 500 : 720;
        const double seconds = std::max(to_each * near / nvlink, to_each * (3 - near) / network) +
                               sent.messages / 3 * (near < 3 ? 11 : 7);
        // Sums of a few numbers: some roundings.
        EXPECT_NEAR(timed.operations[static_cast<size_t>(index)].seconds, seconds, 1e-9 * seconds)
            << op.spec->name << ", " << near << " near, " << network;
      }
      EXPECT_GT(exchanges, 4);
    }
  }
}

TEST(StepTime, OfOneQueueIsTheSum) {
  const StepTime time =
      simulate({{.place = 0, .operations = {compute(1), compute(2)}, .events = {}}});
  EXPECT_DOUBLE_EQ(time.seconds, 3);
  EXPECT_DOUBLE_EQ(products_of(time), 3);
}

TEST(StepTime, CountsOnlyWhatOfAnExchangeIsExposed) {
  // The second product runs beside the exchange, the third one waits for it.
  const StepTime time = simulate({{.place = 0,
                                   .operations = {compute(1), exchange(3), compute(2), compute(1)},
                                   .events = {{0, 1}, {1, 3}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 5);
  EXPECT_DOUBLE_EQ(products_of(time), 4);
  EXPECT_DOUBLE_EQ(exposed_of(time, RankGroup::etp_ep), 1);
  EXPECT_DOUBLE_EQ(time.idle, 0);
}

TEST(StepTime, CollectivesOfTwoQueuesTakeTurnsOnALink) {
  TimedOperation tokens = exchange(3);
  TimedOperation gradients = exchange(3);
  gradients.queue = Queue::replicas;
  const auto seconds = [&](Link of_tokens, Link of_gradients) {
    tokens.link = of_tokens;
    gradients.link = of_gradients;
    return simulate({{.place = 0, .operations = {gradients, tokens}, .events = {}}}).seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(Link::network, Link::network), 3 + 3);
  EXPECT_DOUBLE_EQ(seconds(Link::nvlink, Link::nvlink), 3 + 3);
  EXPECT_DOUBLE_EQ(seconds(Link::nvlink, Link::network), 3);
}

TEST(StepTime, ACpuRunsOneOperationAtATime) {
  TimedProgram program = {
      .place = 0, .operations = {compute(1), exchange(3), compute(2)}, .events = {{0, 1}}};
  EXPECT_DOUBLE_EQ(simulate({program}).seconds, 1 + 3);
  program.is_serial = true;
  EXPECT_DOUBLE_EQ(simulate({program}).seconds, 1 + 3 + 2);
}

TEST(StepTime, AnExchangeTakesNothingFromAProductThatLeavesItMultiprocessors) {
  TimedOperation over_nvlink = exchange(3);
  over_nvlink.link = Link::nvlink;
  TimedOperation leaving = compute(2);
  leaving.leaves_room = true;
  const StepTime time = simulate({{.place = 0,
                                   .operations = {compute(1), over_nvlink, leaving, compute(1)},
                                   .events = {{0, 1}, {1, 3}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 1 + 3 + 1);
  EXPECT_DOUBLE_EQ(products_of(time), 4);
}

TEST(StepTime, AnExchangeOverNvlinkTakesTheTimeThatItRunsBesideFromTheProducts) {
  TimedOperation over_nvlink = exchange(3);
  over_nvlink.link = Link::nvlink;
  // The second product is looked at after the exchange, and takes 2 seconds more.
  StepTime time = simulate({{.place = 0,
                             .operations = {compute(1), over_nvlink, compute(2), compute(1)},
                             .events = {{0, 1}, {1, 3}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 1 + 4 + 1);
  EXPECT_DOUBLE_EQ(products_of(time), 6);
  EXPECT_DOUBLE_EQ(exposed_of(time, RankGroup::etp_ep), 0);
  // It is looked at before, and ends 2 seconds later than was thought.
  time = simulate({{.place = 0,
                    .operations = {compute(1), compute(2), over_nvlink, compute(1)},
                    .events = {{0, 2}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 1 + 2 + 2 + 1);
  EXPECT_DOUBLE_EQ(products_of(time), 4 + 2);
  EXPECT_DOUBLE_EQ(time.idle, 0);
}

TEST(StepTime, ReceiverWaitsForSender) {
  using Action = MessageUse::Action;
  const StepTime time = simulate(
      {{.place = 0, .operations = {compute(4), message(Action::send, 1, 1)}, .events = {{0, 1}}},
       {.place = 1,
        .operations = {message(Action::receive, 0, 0), compute(2)},
        .events = {{0, 1}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 7);
  EXPECT_DOUBLE_EQ(products_of(time), 3) << "the mean of 4 and 2";
  EXPECT_DOUBLE_EQ(exposed_of(time, RankGroup::pp), 0.5);
  EXPECT_DOUBLE_EQ(time.bubble, 2) << "half of the receiver's wait for the sender";
  EXPECT_DOUBLE_EQ(time.idle, 1.5) << "half of the sender's time after its work";
}

TEST(StepTime, CopiesAreTheMeanOfTheRanks) {
  const TimedOperation copy = {.seconds = 3, .queue = Queue::copy};
  const StepTime time =
      simulate({{.place = 0, .operations = {copy, compute(1)}, .events = {{0, 1}}},
                {.place = 1, .operations = {compute(4)}, .events = {}}});
  EXPECT_DOUBLE_EQ(time.seconds, 4);
  EXPECT_DOUBLE_EQ(time.copies, 1.5) << "the mean of 3 and none";
}

TEST(StepTime, CollectivesThatSpanThePipelineBeginTogether) {
  TimedOperation sum = exchange(1);
  sum.spans_pipeline = true;
  const StepTime time =
      simulate({{.place = 0, .operations = {compute(5), sum}, .events = {{0, 1}}},
                {.place = 1, .operations = {compute(2), sum}, .events = {{0, 1}}}});
  EXPECT_DOUBLE_EQ(time.seconds, 6);
  EXPECT_DOUBLE_EQ(time.bubble, 1.5);
  EXPECT_DOUBLE_EQ(exposed_of(time, RankGroup::etp_ep), 1);
}

// Of the ranks of one place, that which computes longest; how long it exchanges does not count.
TEST(StepTime, ThePlaceIsThatOfItsSlowestRank) {
  const TimedProgram computes = {.place = 0, .operations = {compute(2)}, .events = {}};
  const TimedProgram exchanges = {
      .place = 0, .operations = {compute(1), exchange(5)}, .events = {{0, 1}}};
  const std::vector<const TimedProgram*> programs = {&exchanges, &computes, &exchanges};
  EXPECT_DOUBLE_EQ(simulate_slowest(programs, /*places=*/1, /*launch_seconds=*/0).seconds, 2);
}

TEST(StepTime, OfARankAloneHasNoWaits) {
  TimedOperation sum = exchange(1);
  sum.spans_pipeline = true;
  const TimedProgram program = {
      .place = 1,
      .operations = {message(MessageUse::Action::receive, 0, 0.5), compute(2), sum},
      .events = {{0, 1}, {1, 2}}};
  EXPECT_DOUBLE_EQ(seconds_alone(program, /*launch_seconds=*/0), 3.5);
}

}  // namespace
}  // namespace troupe
