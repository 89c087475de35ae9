// Which operation launched what, of made-up records: kernels whose names several operations and
// queues share find their operations in runs in which the queues come in another order.
#include "runtime/launch_order.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/elementwise/fill/fill.h"
#include "program/builder.h"

namespace troupe {
namespace {

class Launches : public ::testing::Test {
 protected:
  void add(Queue queue) {
    Builder builder(program);
    builder.place.queue = queue;
    fill(builder, 1.0, DType::f64, {4}, "one");
  }
  static LaunchRecord record(const std::string& name, int32_t op) {
    return {.name = name, .op = op};
  }
  // The operations that are found for these kernels when nothing of them is known.
  std::vector<int32_t> find(const std::vector<LaunchRecord>& learned,
                            const std::vector<std::string>& names) const {
    std::vector<LaunchRecord> records;
    for (const std::string& name : names) records.push_back(record(name, -1));
    LaunchOrder(program, learned).attribute(records);
    std::vector<int32_t> ops;
    for (const LaunchRecord& each : records) ops.push_back(each.op);
    return ops;
  }

  Program program{std::make_shared<const StateTable>()};
};

TEST_F(Launches, OfOneQueueComeInTheirOrder) {
  for (int i = 0; i < 3; ++i) add(Queue::compute);
  const std::vector<LaunchRecord> learned = {record("copy", -1), record("a", 0),
                                             record("b", 0),     record("a", 1),
                                             record("a", 2),     record("copy", -1)};
  EXPECT_EQ(find(learned, {"copy", "a", "b", "a", "a", "copy"}),
            (std::vector<int32_t>{-1, 0, 0, 1, 2, -1}));
  EXPECT_EQ(find(learned, {"a", "new", "a", "a", "a"}), (std::vector<int32_t>{0, -1, 1, 2, -1}))
      << "what was not there, and what is too much, belongs to no operation";
}

TEST_F(Launches, QueuesMayChangePlaces) {
  add(Queue::communication);  // 0
  add(Queue::compute);        // 1
  add(Queue::compute);        // 2
  add(Queue::communication);  // 3
  const std::vector<LaunchRecord> learned = {record("meet", 0), record("move", 0),
                                             record("move", 1), record("add", 2),
                                             record("move", 3), record("meet", 3)};
  EXPECT_EQ(find(learned, {"move", "add", "meet", "move", "move", "meet"}),
            (std::vector<int32_t>{1, 2, 0, 0, 3, 3}))
      << "no operation of the other queue begins with a move";
  EXPECT_EQ(find(learned, {"meet", "move", "move", "add", "move", "meet"}),
            (std::vector<int32_t>{0, 0, 1, 2, 3, 3}))
      << "of two that could be next, the first one in the program";
}

// Queues in any order against each other: who shares no kernels with another queue is always found.
TEST_F(Launches, RandomOrdersOfQueues) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    Program of_round(program);
    Builder builder(of_round);
    std::vector<LaunchRecord> learned;
    std::vector<std::vector<LaunchRecord>> queues(3);
    for (int32_t op = 0; op < 40; ++op) {
      const auto queue = static_cast<size_t>(random() % 3);
      builder.place.queue = static_cast<Queue>(queue);
      fill(builder, 1.0, DType::f64, {4}, "one");
      // One or two kernels that only this queue has.
      for (uint32_t i = 0; i < 1 + random() % 2; ++i) {
        learned.push_back(record(std::to_string(queue) + "_" + std::to_string(random() % 3), op));
        queues[queue].push_back(learned.back());
      }
    }
    std::vector<LaunchRecord> expected;
    while (expected.size() < learned.size()) {
      std::vector<LaunchRecord>& queue = queues[random() % 3];
      if (queue.empty()) continue;
      expected.push_back(queue.front());
      queue.erase(queue.begin());
    }
    std::vector<LaunchRecord> found = expected;
    for (LaunchRecord& each : found) each.op = -1;
    LaunchOrder(of_round, learned).attribute(found);
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_EQ(found[i].op, expected[i].op) << "round " << round << " record " << i;
    }
  }
}

TEST_F(Launches, WhatIsKnownStays) {
  for (int i = 0; i < 2; ++i) add(Queue::compute);
  const std::vector<LaunchRecord> learned = {record("a", 0), record("a", 1)};
  std::vector<LaunchRecord> records = {record("a", 0), record("a", -1), record("other", 1)};
  LaunchOrder(program, learned).attribute(records);
  EXPECT_EQ(records[0].op, 0);
  EXPECT_EQ(records[1].op, 1);
  EXPECT_EQ(records[2].op, 1);
}

// Of kernels that both queues launch, the queue whose next one is nearest to where it was.
TEST_F(Launches, TheNearestPlaceOfItsQueueIsTaken) {
  add(Queue::communication);  // 0
  add(Queue::compute);        // 1
  add(Queue::compute);        // 2
  add(Queue::communication);  // 3
  const std::vector<LaunchRecord> learned = {record("a", 1), record("b", 1), record("x", 2),
                                             record("c", 0), record("x", 3)};
  EXPECT_EQ(find(learned, {"a", "b", "x", "c", "x"}), (std::vector<int32_t>{1, 1, 2, 0, 3}));
  EXPECT_EQ(find(learned, {"c", "x", "a", "b", "x"}), (std::vector<int32_t>{0, 3, 1, 1, 2}));
}

// The first operation, too, is known by its number.
TEST_F(Launches, AKnownOperationTakesItsOwnPlace) {
  add(Queue::compute);        // 0
  add(Queue::communication);  // 1
  const std::vector<LaunchRecord> learned = {record("lead", 0), record("x", 0), record("x", 1)};
  std::vector<LaunchRecord> records = {record("x", 0), record("x", -1), record("x", -1)};
  LaunchOrder(program, learned).attribute(records);
  EXPECT_EQ(records[0].op, 0);
  EXPECT_EQ(records[1].op, 1);
  EXPECT_EQ(records[2].op, -1);
}

}  // namespace
}  // namespace troupe
