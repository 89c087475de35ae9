// Events between queues: on random programs whose operations are on random queues everything that
// must not run side by side is ordered, by an account of conflicts and of what follows from what
// that is written here a third time; and every single event is needed. What counts as a conflict,
// one by one; and what the verifier says.
#include "passes/queue_events.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/pipeline_message/pipeline_message.h"
#include "passes/memory_plan.h"
#include "program/toy_operations.h"
#include "program/verify.h"

namespace troupe {
namespace {

using namespace testing;

std::unique_ptr<Program> make_random_program(uint32_t seed, const ToyState& state, int queues) {
  std::mt19937 random(seed);
  const auto draw = [&](uint32_t bound) { return random() % bound; };
  auto program = std::make_unique<Program>(state.table);
  Builder builder(*program);
  const ValueId metric = builder.metric("metric", DType::f32, {2});
  const ValueId input = builder.input("input", DType::f32, {5, 4});
  std::vector<ValueId> values = {toy_make(builder, 3, "first"), input};
  const uint32_t ops = 5 + draw(80);
  const uint32_t patience = 1 + draw(6);  // operations until the queue changes
  for (uint32_t i = 0; i < ops; ++i) {
    if (draw(patience) == 0) {
      builder.place.queue = static_cast<Queue>(draw(static_cast<uint32_t>(queues)));
      builder.place.layer = static_cast<int16_t>(i / 10);
    }
    const size_t back = draw(4) == 0
                            ? draw(static_cast<uint32_t>(values.size()))
                            : draw(std::min<uint32_t>(4, static_cast<uint32_t>(values.size())));
    const ValueId x = values[values.size() - 1 - back];
    const bool ragged = program->value(x).rows.valid();
    const Queue queue = builder.place.queue;
    switch (draw(8)) {
      case 0:
        values.push_back(toy_make(builder, 1 + draw(200), "make"));
        break;
      case 1:
      case 2:
        values.push_back(toy_halve(builder, x, "half"));
        break;
      case 3:
        if (!ragged) values.push_back(toy_mix(builder, x, x, "mix")[draw(2)]);
        break;
      case 4: {
        const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {x}, "n")[0];
        values.push_back(
            builder.emit(kToyChoose, Attributes(NoAttributes()), {x, counts}, "some")[0]);
        break;
      }
      case 5:
        builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
                     {x, x, builder.state(state.gradients[draw(2)])}, "dw");
        break;
      case 6:
        toy_collect(builder, metric, x, true);
        break;
      case 7:
        builder.emit(kAllReduce, Attributes(AllReduceAttributes{}), {metric}, "sum");
        break;
    }
    builder.place.queue = queue;
  }
  program->add_result(values.back());
  verify_program(*program);
  return program;
}

struct Use {
  int arena = 0;  // state, persistent, transient; the host's state and transient
  uint64_t begin = 0;
  uint64_t end = 0;
  bool writes = false;
};

std::vector<Use> uses_of(const Program& program, const MemoryPlan& plan, int32_t index) {
  const StateLayout state(program.state());
  const Op& op = program.op(index);
  std::vector<Use> uses;
  const auto add = [&](ValueId id, bool writes) {
    if (!id.valid()) return;
    const Value& value = program.value(id);
    const auto place = static_cast<size_t>(id.index);
    Use use{.arena = 2, .begin = plan.offset[place], .writes = writes};
    if (is_state(value.role)) {
      use.arena = program.state()[value.state].on_host ? 3 : 0;
      use.begin = state.offset[static_cast<size_t>(value.state.index)];
    } else if (is_on_host(value.role)) {
      use.arena = 4;
    } else if (is_persistent(value.role)) {
      use.arena = 1;
    }
    use.end = use.begin + value.bytes();
    uses.push_back(use);
  };
  for (const ValueId id : program.inputs(op)) {
    add(id, false);
    if (id.valid()) add(program.value(id).rows.counter, false);
  }
  for (const ValueId id : program.outputs(op)) {
    add(id, true);
    add(program.value(id).rows.counter, false);
  }
  if (plan.device == Device::cpu) add(op.workspace, true);
  return uses;
}

// By pairs of operations: do they have to keep their order?
std::vector<std::vector<bool>> find_conflicts(const Program& program, const MemoryPlan& plan) {
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<std::vector<Use>> uses;
  for (int32_t i = 0; i < program.op_count(); ++i) uses.push_back(uses_of(program, plan, i));
  std::vector<std::vector<bool>> conflicts(ops, std::vector<bool>(ops, false));
  for (size_t a = 0; a < ops; ++a) {
    for (size_t b = a + 1; b < ops; ++b) {
      const Op& first = program.op(static_cast<int32_t>(a));
      const Op& second = program.op(static_cast<int32_t>(b));
      bool conflict = first.spec->group != nullptr && second.spec->group != nullptr &&
                      queue_of(first.spec->group(first.attributes)) ==
                          queue_of(second.spec->group(second.attributes));
      for (const Use& x : uses[a]) {
        for (const Use& y : uses[b]) {
          conflict |=
              x.arena == y.arena && x.begin < y.end && y.begin < x.end && (x.writes || y.writes);
        }
      }
      conflicts[a][b] = conflict;
    }
  }
  return conflicts;
}

// By pairs of operations: does the second one begin after the first one has ended?
std::vector<std::vector<bool>> find_order(const Program& program,
                                          const std::vector<QueueEvent>& events) {
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<std::vector<bool>> order(ops, std::vector<bool>(ops, false));
  const auto link = [&](size_t before, size_t after) {
    order[before][after] = true;
    for (size_t i = 0; i < before; ++i) {
      if (order[i][before]) order[i][after] = true;
    }
  };
  for (size_t after = 0; after < ops; ++after) {
    for (size_t before = after; before-- > 0;) {
      if (program.op(static_cast<int32_t>(before)).place.queue !=
          program.op(static_cast<int32_t>(after)).place.queue) {
        continue;
      }
      link(before, after);
      break;
    }
    for (const QueueEvent& event : events) {
      if (event.after == static_cast<int32_t>(after)) {
        link(static_cast<size_t>(event.before), after);
      }
    }
  }
  return order;
}

bool is_sound(const std::vector<std::vector<bool>>& conflicts,
              const std::vector<std::vector<bool>>& order) {
  for (size_t a = 0; a < conflicts.size(); ++a) {
    for (size_t b = a + 1; b < conflicts.size(); ++b) {
      if (conflicts[a][b] && !order[a][b]) return false;
    }
  }
  return true;
}

std::vector<QueueEvent> without(std::vector<QueueEvent> events, size_t left_out) {
  events.erase(events.begin() + static_cast<std::ptrdiff_t>(left_out));
  return events;
}

TEST(QueueEvents, RandomProgramsHaveAllThatAreNeededAndNoOthers) {
  const ToyState state = make_toy_state(2);
  size_t count = 0;
  for (uint32_t seed = 0; seed < 240; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto program =
        make_random_program(seed, state, /*queues=*/1 + static_cast<int>(seed % 3));
    const Device device = seed % 2 == 0 ? Device::cpu : Device::cuda;
    const MemoryPlan plan =
        seed % 5 == 0 ? plan_oracle(*program, 1, device) : plan_memory(*program, 1, device);
    verify_memory_plan(*program, plan);
    const std::vector<QueueEvent> events = find_queue_events(*program, plan);
    if (seed % 3 == 0) {
      EXPECT_TRUE(events.empty()) << "one queue";
    }
    count += events.size();
    const auto conflicts = find_conflicts(*program, plan);
    EXPECT_TRUE(is_sound(conflicts, find_order(*program, events)));
    EXPECT_EQ(find_queue_fault(*program, plan, events).value_or(""), "");
    for (size_t i = 0; i < events.size(); ++i) {
      const QueueEvent& event = events[i];
      EXPECT_LT(event.before, event.after);
      EXPECT_NE(program->op(event.before).place.queue, program->op(event.after).place.queue);
      if (i > 0) {
        const bool new_queue =
            program->op(event.before).place.queue != program->op(events[i - 1].before).place.queue;
        EXPECT_TRUE(event.after > events[i - 1].after ||
                    (event.after == events[i - 1].after && new_queue));
      }
      const std::vector<QueueEvent> fewer = without(events, i);
      EXPECT_FALSE(is_sound(conflicts, find_order(*program, fewer))) << "event " << i;
      EXPECT_TRUE(find_queue_fault(*program, plan, fewer).has_value()) << "event " << i;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(count, 1000U) << "programs with nothing to order show nothing";
}

// Whatever events there are, the verifier finds a fault exactly where there is one.
TEST(QueueEvents, TheVerifierAgreesWithTheDefinition) {
  const ToyState state = make_toy_state(2);
  std::mt19937 random(5);
  int sound = 0;
  int faulty = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto program = make_random_program(seed, state, 3);
    const MemoryPlan plan = plan_memory(*program, 1);
    std::vector<QueueEvent> events = find_queue_events(*program, plan);
    // Some events more, which do no harm, and perhaps one less.
    for (int i = 0; i < 5; ++i) {
      const auto after =
          static_cast<int32_t>(random() % static_cast<uint32_t>(program->op_count()));
      if (after == 0) continue;
      const auto before = static_cast<int32_t>(random() % static_cast<uint32_t>(after));
      if (program->op(before).place.queue == program->op(after).place.queue) continue;
      events.push_back({before, after});
    }
    std::stable_sort(events.begin(), events.end(),
                     [](const QueueEvent& a, const QueueEvent& b) { return a.after < b.after; });
    if (!events.empty() && seed % 2 == 0) events = without(events, random() % events.size());
    const bool expected = is_sound(find_conflicts(*program, plan), find_order(*program, events));
    EXPECT_EQ(!find_queue_fault(*program, plan, events).has_value(), expected);
    ++(expected ? sound : faulty);
  }
  EXPECT_GT(sound, 20);
  EXPECT_GT(faulty, 20);
}

class Conflicts : public ::testing::Test {
 protected:
  void on(Queue queue) { builder.place.queue = queue; }
  // "0>2 1>3"
  std::string events(const MemoryPlan& plan) const {
    std::string text;
    for (const QueueEvent& event : find_queue_events(program, plan)) {
      if (!text.empty()) text += " ";
      text += std::to_string(event.before) + ">" + std::to_string(event.after);
    }
    return text;
  }
  std::string events() const { return events(plan_oracle(program, 1)); }

  ToyState state = make_toy_state(2);
  Program program{state.table};
  Builder builder{program};
};

TEST_F(Conflicts, ResultsAreRead) {
  const ValueId a = toy_make(builder, 4, "a");
  on(Queue::communication);
  const ValueId b = toy_halve(builder, a, "b");
  toy_halve(builder, a, "c");  // knows already
  on(Queue::compute);
  toy_make(builder, 4, "other");
  toy_halve(builder, b, "d");
  EXPECT_EQ(events(), "0>1 1>4");
}

TEST_F(Conflicts, ReadingSideBySideIsNone) {
  const ValueId a = builder.input("a", DType::f32, {4});
  toy_halve(builder, a, "b");
  on(Queue::copy);
  toy_halve(builder, a, "c");
  EXPECT_EQ(events(), "");
}

TEST_F(Conflicts, StateAndMetricsAreWrittenAndReadInOrder) {
  const ValueId metric = builder.metric("metric", DType::f32, {2});
  const ValueId x = builder.input("x", DType::f32, {4, 4});
  toy_collect(builder, metric, x, true);
  on(Queue::communication);
  toy_collect(builder, metric, x, true);  // after the write
  on(Queue::compute);
  const ValueId parameter = builder.state(state.frozen);
  toy_halve(builder, parameter, "h");
  on(Queue::copy);
  toy_halve(builder, metric, "read");        // after the second write, which knows the first
  toy_collect(builder, parameter, x, true);  // after the read
  EXPECT_EQ(events(), "0>1 1>3 2>4");
}

TEST_F(Conflicts, RowCountersAreRead) {
  const ValueId x = builder.input("x", DType::f32, {4, 4});
  const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {x}, "n")[0];
  on(Queue::communication);
  const ValueId some = builder.emit(kToyChoose, Attributes(NoAttributes()), {x, counts}, "some")[0];
  on(Queue::copy);
  toy_halve(builder, some, "half");  // after both, and the second one knows the first
  EXPECT_EQ(events(), "0>1 1>2");
}

TEST_F(Conflicts, TheLatestOfAQueueIsEnough) {
  const ValueId a = toy_make(builder, 4, "a");
  const ValueId b = toy_make(builder, 4, "b");
  on(Queue::copy);
  const ValueId c = toy_make(builder, 4, "c");
  on(Queue::communication);
  toy_mix(builder, a, b, "d");
  toy_mix(builder, b, c, "e");
  EXPECT_EQ(events(), "1>3 2>4");
}

TEST_F(Conflicts, ReusedMemoryWaitsForItsLastUsers) {
  const ValueId a = toy_make(builder, 100, "a");
  on(Queue::communication);
  toy_collect(builder, builder.metric("metric", DType::f32, {2}), a, false);
  on(Queue::compute);
  toy_make(builder, 100, "b");
  MemoryPlan plan = plan_oracle(program, 1);
  EXPECT_EQ(events(plan), "0>1");
  plan.offset[2] = plan.offset[0] + MemoryPlan::kAlignment;  // b, and a, in part
  EXPECT_EQ(program.value(ValueId{2}).name, "b");
  EXPECT_EQ(events(plan), "0>1 1>2");
}

TEST_F(Conflicts, WorkspaceIsWritten) {
  const ValueId x = builder.input("x", DType::f32, {64, 4});
  builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
               {x, x, builder.state(state.gradients[0])}, "dw");
  on(Queue::communication);
  builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
               {x, x, builder.state(state.gradients[1])}, "dw");
  EXPECT_EQ(events(plan_memory(program, 1)), "0>1") << "of the CPU, where both have the same";
  EXPECT_EQ(events(plan_memory(program, 1, Device::cuda)), "") << "GPUs have none";
}

// Attention that reaches other ranks is on the compute queue.
TEST_F(Conflicts, WhatReachesOtherRanksKeepsItsOrder) {
  const ValueId a = builder.metric("a", DType::f32, {2});
  const ValueId b = builder.metric("b", DType::f32, {2});
  const std::vector<ValueId> first = {a};
  all_reduce(builder, first, {});
  builder.emit(kAllReduce, Attributes(AllReduceAttributes{}), {b}, "on the compute queue");
  all_reduce(builder, first, {});
  EXPECT_EQ(events(), "0>1 1>2");
}

TEST_F(Conflicts, SumsOfGradientsDoNotHoldTokensUp) {
  const std::vector<ValueId> gradient = {builder.metric("gradient", DType::f32, {2})};
  const std::vector<ValueId> tokens = {builder.metric("tokens", DType::f32, {2})};
  all_reduce(builder, gradient, {.group = RankGroup::edp_within_instance});
  all_reduce(builder, tokens, {.group = RankGroup::etp_ep_across_nodes});
  all_reduce(builder, tokens, {.group = RankGroup::etp_ep_within_node});
  all_reduce(builder, gradient, {.group = RankGroup::tp});
  const auto queue = [&](int32_t index) { return program.op(index).place.queue; };
  EXPECT_EQ(queue(0), Queue::replicas);
  EXPECT_EQ(queue(1), Queue::network);
  EXPECT_EQ(queue(2), Queue::tokens);
  EXPECT_EQ(queue(3), Queue::communication);
  EXPECT_EQ(events(), "1>2 0>3") << "only what changes the same values";
}

TEST_F(Conflicts, MessagesEndBeforeTheirMemoryIsUsedAgain) {
  const ValueId a = fill(builder, 1, DType::f32, {16, 4}, "a");
  send(builder, a, {.peer = 1});
  const ValueId b = toy_make(builder, 16, "b");
  finish_send(builder, a, {.peer = 1});
  const ValueId c = toy_make(builder, 16, "c");
  toy_mix(builder, b, c, "d");
  MemoryPlan plan = plan_oracle(program, 1);
  plan.offset[static_cast<size_t>(c.index)] = plan.offset[static_cast<size_t>(a.index)];
  EXPECT_EQ(events(plan), "0>1 3>4");
}

using QueueEventsDeathTest = Conflicts;

TEST_F(QueueEventsDeathTest, TheVerifierNamesBothOperations) {
  const ValueId a = toy_make(builder, 4, "a");
  on(Queue::communication);
  toy_halve(builder, a, "b");
  const MemoryPlan plan = plan_memory(program, 1);
  verify_queue_events(program, plan, find_queue_events(program, plan));
  EXPECT_DEATH(verify_queue_events(program, plan, {}),
               "operation 1 \\(halve, comm\\) does not wait for operation 0 \\(make, "
               "compute\\), which uses memory of a");
  const std::vector<QueueEvent> backwards = {{.before = 1, .after = 0}};
  EXPECT_DEATH(verify_queue_events(program, plan, backwards), "no event: from 1 to operation 0");
}

// What the plan keeps for queues that are not done: see memory_plan.h.
class Reservations : public Conflicts {
 protected:
  ValueId compute(int16_t layer, const std::string& name) {
    builder.place = {.queue = Queue::compute, .layer = layer};
    return toy_make(builder, 16, name);
  }
  int32_t until(ValueId id) const { return find_queue_reservations(program)[id]; }
};

TEST_F(Reservations, UntilTheComputeQueueWaitsAnyway) {
  const ValueId a = compute(0, "a");
  on(Queue::communication);
  const ValueId b = toy_halve(builder, a, "b");  // 1
  compute(0, "c");                               // 2
  compute(0, "d");                               // 3
  toy_halve(builder, b, "e");                    // 4
  EXPECT_EQ(until(a), 3);
  EXPECT_EQ(until(b), 3);
  EXPECT_EQ(find_queue_reservations(program)[ValueId{2}], -1) << "c, which no other queue touches";
  // The next on the compute queue may run while the communication does.
  const MemoryPlan plan = plan_memory(program, 1, Device::cuda);
  EXPECT_EQ(events(plan), "0>1 1>4");
}

TEST_F(Reservations, NoLongerThanTheNextLayer) {
  const ValueId a = compute(0, "a");
  on(Queue::copy);
  toy_halve(builder, a, "b");  // 1, not read
  compute(0, "c");             // 2
  compute(1, "d");             // 3
  compute(1, "e");             // 4
  compute(2, "f");             // 5
  EXPECT_EQ(until(a), 4);
}

// A forward and a backward that take turns, with a weight gradient of another layer between.
TEST_F(Reservations, UntilTheEndOfTheNextLayerOfTheSamePass) {
  const auto compute_in = [&](int16_t layer, int32_t micro_batch, Phase phase) {
    builder.place = {.phase = phase, .layer = layer, .micro_batch = micro_batch};
    return toy_make(builder, 16, "a");
  };
  const ValueId a = compute_in(0, 1, Phase::forward);  // 0
  builder.place.queue = Queue::communication;
  toy_halve(builder, a, "b");                // 1
  compute_in(5, 0, Phase::weight_gradient);  // 2
  compute_in(4, 0, Phase::data_gradient);    // 3
  compute_in(1, 1, Phase::forward);          // 4
  compute_in(4, 0, Phase::weight_gradient);  // 5
  compute_in(1, 1, Phase::forward);          // 6
  compute_in(3, 0, Phase::data_gradient);    // 7
  compute_in(2, 1, Phase::forward);          // 8
  EXPECT_EQ(until(a), 6);
}

TEST_F(Reservations, ProgramsOfOneQueueHaveNone) {
  const ValueId a = compute(0, "a");
  toy_halve(builder, a, "b");
  for (const int32_t last : find_queue_reservations(program)) EXPECT_EQ(last, -1);
}

}  // namespace
}  // namespace troupe
