// Queues run side by side: whatever a queue does early or late, as long as it keeps its own order
// and waits for the events that are derived from the program and its memory plan, training steps
// leave the bits that program order leaves. Real steps in layouts of all kinds, with every form of
// overlap, recompute and sharding, run operation by operation in drawn orders, on CPUs: on GPUs the
// streams choose. And no event could be left out.
#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "passes/memory_plan.h"
#include "passes/queue_events.h"
#include "support/interleaving.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/random_layouts.h"

namespace troupe::testing {
namespace {

// Of the random layouts of up to eight ranks those that bring something, by their names, that none
// before them has; and two in which little happens in order.
std::vector<LayoutCase> layouts() {
  std::vector<LayoutCase> chosen;
  std::set<std::string> seen;
  for (LayoutCase& c : random_layouts(320)) {
    if (c.layout.world_size > 8) continue;
    bool is_new = false;
    std::istringstream words(c.name);
    for (std::string word; std::getline(words, word, '_');) is_new |= seen.insert(word).second;
    if (is_new) chosen.push_back(std::move(c));
  }
  LayoutCase busy;
  busy.name = "ep2_everything_overlapped";
  busy.model = auxiliary_loss_models(moe_model(2))[2].config;
  busy.model.num_experts = 8;
  busy.layout.world_size = busy.layout.expert_parallel = 2;
  busy.layout.expert_tensor_parallel = 1;
  busy.dispatcher = TokenDispatcher::alltoall;
  busy.micro_batches = 3;
  busy.merged = true;
  busy.early_collectives = true;
  busy.overlap = {.delay_weight_gradients = true, .shared_expert = true};
  chosen.push_back(busy);
  busy.name = "ep2_everything_overlapped_sharded_recomputed";
  busy.layout.world_size = 4;
  busy.sharding = StateSharding::parameters;
  busy.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                    .expert_activation = true,
                    .moe = true};
  chosen.push_back(busy);
  return chosen;
}

class QueueOrder : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(QueueOrder, KeepsEveryBit) {
  const LayoutCase& c = GetParam();
  const Outcome expected = run_layout(c);
  const uint32_t count = c.layout.world_size <= 2 ? 48 : 8;
  for (uint32_t seed = 0; seed < count; ++seed) {
    SCOPED_TRACE("interleaving " + std::to_string(seed));
    expect_same_bits(expected, run_layout(c, {.interleaving = seed}));
    if (HasFailure()) return;
  }
}

// With memory of its own for every value: true dependencies alone, and the most freedom.
TEST_P(QueueOrder, KeepsEveryBitWithoutReuseOfMemory) {
  const LayoutCase& c = GetParam();
  const Outcome expected = run_layout(c);
  for (uint32_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE("interleaving " + std::to_string(seed));
    expect_same_bits(expected, run_layout(c, {.oracle = true, .interleaving = seed}));
    if (HasFailure()) return;
  }
}

// Plans for both devices, which differ in what they reserve for queues.
TEST_P(QueueOrder, NeedsEveryEvent) {
  const LayoutCase& c = GetParam();
  const std::unique_ptr<const Program> program = program_of(c, c.layout.world_size - 1);
  for (const Device device : {Device::cpu, Device::cuda}) {
    const MemoryPlan plan = plan_memory(*program, 1, device);
    verify_memory_plan(*program, plan);
    const std::vector<QueueEvent> events = find_queue_events(*program, plan);
    EXPECT_FALSE(events.empty());
    verify_queue_events(*program, plan, events);
    for (size_t i = 0; i < events.size(); ++i) {
      std::vector<QueueEvent> fewer = events;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      ASSERT_TRUE(find_queue_fault(*program, plan, fewer).has_value())
          << "from operation " << events[i].before << " to " << events[i].after;
    }
  }
}

// The drawn orders are others than the program's: what is on other queues can come later.
TEST_P(QueueOrder, LeavesRoom) {
  const std::unique_ptr<const Program> program = program_of(GetParam(), 0);
  const MemoryPlan plan = plan_memory(*program, 1);
  const std::vector<QueueEvent> events = find_queue_events(*program, plan);
  int32_t moved = 0;
  int32_t last = -1;
  for (const int32_t index : draw_interleaving(*program, events, kAsLateAsPossible)) {
    moved += index < last ? 1 : 0;
    last = index;
  }
  EXPECT_GT(moved, 0);
}

INSTANTIATE_TEST_SUITE_P(Layouts, QueueOrder, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return info.param.name; });

// How many operations of the compute queue may run while each one of another queue does, no more
// than `most` counted: the sum over these.
int64_t count_side_by_side(const Program& program, const std::vector<QueueEvent>& events,
                           int64_t most) {
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<int64_t> computed(ops);  // operations of the compute queue before each
  std::vector<std::array<int32_t, kQueueCount>> clocks(ops);
  std::array<int32_t, kQueueCount> last{};
  last.fill(-1);
  std::vector<int32_t> awaited_by(ops, program.op_count() - 1);
  size_t next = 0;
  int64_t count = 0;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    const auto queue = static_cast<size_t>(program.op(i).place.queue);
    auto& clock = clocks[static_cast<size_t>(i)];
    clock.fill(-1);
    if (last[queue] >= 0) clock = clocks[static_cast<size_t>(last[queue])];
    for (; next < events.size() && events[next].after == i; ++next) {
      const auto& other = clocks[static_cast<size_t>(events[next].before)];
      for (size_t k = 0; k < kQueueCount; ++k) clock[k] = std::max(clock[k], other[k]);
    }
    clock[queue] = last[queue] = i;
    computed[static_cast<size_t>(i)] = count;
    if (program.op(i).place.queue != Queue::compute) continue;
    ++count;
    for (int32_t other = 0; other < i; ++other) {
      int32_t& by = awaited_by[static_cast<size_t>(other)];
      const auto of = static_cast<size_t>(program.op(other).place.queue);
      if (clock[of] >= other) by = std::min(by, i);
    }
  }
  int64_t sum = 0;
  for (size_t i = 0; i < ops; ++i) {
    if (program.op(static_cast<int32_t>(i)).place.queue == Queue::compute) continue;
    const int32_t begins = clocks[i][static_cast<size_t>(Queue::compute)];
    const int64_t before = begins < 0 ? 0 : computed[static_cast<size_t>(begins)] + 1;
    const int64_t between = computed[static_cast<size_t>(awaited_by[i])] - before;
    sum += std::clamp<int64_t>(between, 0, most);
  }
  return sum;
}

// What a GPU's plan reserves is what lets queues run side by side: nearly as if no memory was used
// again, for a stretch of a layer's operations; without reservations it is much less.
TEST(QueueReservations, ComputeWaitsForLittleThatItDoesNotNeed) {
  constexpr int64_t kOfALayer = 20;
  const std::vector<LayoutCase> all = layouts();
  for (const LayoutCase& c : {all[all.size() - 2], all.back()}) {
    SCOPED_TRACE(c.name);
    const std::unique_ptr<const Program> program = program_of(c, 0);
    const auto count = [&](const MemoryPlan& plan) {
      return count_side_by_side(*program, find_queue_events(*program, plan), kOfALayer);
    };
    const int64_t possible = count(plan_oracle(*program, 1, Device::cuda));
    const int64_t reserved = count(plan_memory(*program, 1, Device::cuda));
    const int64_t tight = count(plan_memory(*program, 1, Device::cpu));
    EXPECT_LE(reserved, possible);
    EXPECT_GT(10 * reserved, 8 * possible) << reserved << " of " << possible;
    EXPECT_GT(10 * reserved, 11 * tight) << reserved << " instead of " << tight;
  }
}

}  // namespace
}  // namespace troupe::testing
