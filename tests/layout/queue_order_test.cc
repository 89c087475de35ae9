// Queues run side by side: whatever a queue does early or late, as long as it keeps its own order
// and waits for the events that are derived from the program and its memory plan, training steps
// leave the bits that program order leaves. Real steps in layouts of all kinds, with every form of
// overlap, recompute, offload and sharding, run operation by operation in drawn orders, on CPUs: on
// GPUs the streams choose. And no event could be left out.
#include <algorithm>
#include <array>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "passes/memory_plan.h"
#include "passes/queue_events.h"
#include "support/interleaving.h"
#include "support/layout_models.h"
#include "support/layout_run.h"
#include "support/random_layouts.h"

namespace troupe::testing {
namespace {

// Layouts in which little happens in the order of the program.
std::vector<LayoutCase> busy_layouts() {
  LayoutCase c;
  c.name = "ep2_everything_overlapped";
  c.model = auxiliary_loss_models(moe_model(2))[2].config;
  c.model.num_experts = 8;
  c.layout.world_size = c.layout.expert_parallel = 2;
  c.layout.expert_tensor_parallel = 1;
  c.dispatcher = TokenDispatcher::alltoall;
  c.micro_batches = 3;
  c.merged = true;
  c.early_collectives = true;
  c.overlap = {.delay_weight_gradients = true, .shared_expert = true};
  LayoutCase sharded = c;
  sharded.name = "ep2_everything_overlapped_sharded_recomputed";
  sharded.layout.world_size = 4;
  sharded.sharding = StateSharding::parameters;
  sharded.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                       .modules = {&kExpertActivationModule, &kMoeModule}};
  return {c, sharded};
}

// With copies to the host's memory and back.
std::vector<LayoutCase> offloaded_layouts() {
  LayoutCase c;
  c.name = "one_rank_offloaded";
  c.model = auxiliary_loss_models(moe_model(4))[1].config;
  c.micro_batches = 2;
  c.offload = {
      .modules = {&kInputNormModule, &kQkvModule, &kCoreAttentionModule, &kAttentionOutModule,
                  &kFeedForwardNormModule, &kExpertFc1Module, &kExpertActivationModule},
      .least_elements = 1};
  c.optimizer_offload = 0.5;
  LayoutCase overlapped = c;
  overlapped.name = "ep2_offloaded_overlapped";
  overlapped.layout.world_size = overlapped.layout.expert_parallel = 2;
  overlapped.layout.expert_tensor_parallel = 1;
  overlapped.dispatcher = TokenDispatcher::flex;
  overlapped.early_collectives = true;
  overlapped.overlap = {.delay_weight_gradients = true, .shared_expert = true};
  overlapped.recompute = {.granularity = RecomputeOptions::Granularity::selective,
                          .modules = {&kCoreAttentionModule, &kNormModule}};
  LayoutCase pipeline = overlapped;
  pipeline.name = "pp2_ep2_offloaded_overlapped";
  pipeline.layout.world_size = 4;
  pipeline.layout.pipeline_parallel = 2;
  pipeline.micro_batches = 4;
  return {c, overlapped, pipeline};
}

// And of the random layouts of up to eight ranks those that bring something, by their names, that
// none before them has.
std::vector<LayoutCase> layouts() {
  std::vector<LayoutCase> chosen = busy_layouts();
  for (const LayoutCase& c : offloaded_layouts()) chosen.push_back(c);
  std::set<std::string> seen;
  for (LayoutCase& c : random_layouts(320)) {
    if (c.layout.world_size > 8) continue;
    bool is_new = false;
    std::istringstream words(c.name);
    for (std::string word; std::getline(words, word, '_');) is_new |= seen.insert(word).second;
    if (is_new) chosen.push_back(std::move(c));
  }
  return chosen;
}

class QueueOrder : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(QueueOrder, KeepsEveryBit) {
  const LayoutCase& c = GetParam();
  const Outcome expected = run_layout(c);
  const uint32_t count = c.layout.world_size <= 2 ? 24 : 8;
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
  for (const LayoutCase& c : busy_layouts()) {
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

// The queues of all ranks, each of which goes on as soon as it can.
class RunningRanks {
 public:
  RunningRanks(const LayoutCase& c, bool reuses_memory) : run_(run_layout_of(c)) {
    for (int32_t rank = 0; rank < c.layout.world_size; ++rank) {
      Rank& own = ranks_.emplace_back();
      own.program = program_of(c, rank);
      const Program& program = *own.program;
      const auto ops = static_cast<size_t>(program.op_count());
      own.is_done.resize(ops, false);
      own.waits.resize(ops);
      const MemoryPlan plan = reuses_memory ? plan_memory(program, 1, Device::cuda)
                                            : plan_oracle(program, 1, Device::cuda);
      for (const QueueEvent& event : find_queue_events(program, plan)) {
        own.waits[static_cast<size_t>(event.after)].push_back(event.before);
      }
      for (int32_t i = 0; i < program.op_count(); ++i) {
        own.queues[static_cast<size_t>(program.op(i).place.queue)].push_back(i);
      }
    }
  }

  // Until nothing can go on. Which rank is looked at first makes no difference: what one does takes
  // nothing from another. Returns how many operations are left.
  size_t run() {
    for (bool any = true; any;) {
      any = false;
      for (int32_t rank = 0; rank < static_cast<int32_t>(ranks_.size()); ++rank) {
        for (std::deque<int32_t>& queue : ranks_[static_cast<size_t>(rank)].queues) {
          while (!queue.empty() && may_end(rank, queue.front())) {
            ranks_[static_cast<size_t>(rank)].is_done[static_cast<size_t>(queue.front())] = true;
            queue.pop_front();
            any = true;
          }
        }
      }
    }
    size_t left = 0;
    for (const Rank& rank : ranks_) {
      for (const std::deque<int32_t>& queue : rank.queues) left += queue.size();
    }
    return left;
  }

 private:
  struct Rank {
    std::unique_ptr<const Program> program;
    std::array<std::deque<int32_t>, kQueueCount> queues;
    std::vector<std::vector<int32_t>> waits;  // by operation: what has to be done before
    std::vector<bool> is_done;
    std::map<RankGroup, size_t> collectives;  // in which it has taken part
  };
  using Number = std::tuple<RankGroup, int32_t, size_t>;  // kind, first member, number
  using Way = std::pair<int32_t, int32_t>;

  bool may_end(int32_t rank, int32_t index) {
    Rank& own = ranks_[static_cast<size_t>(rank)];
    for (const int32_t before : own.waits[static_cast<size_t>(index)]) {
      if (!own.is_done[static_cast<size_t>(before)]) return false;
    }
    const Op& op = own.program->op(index);
    if (op.spec->group == nullptr) return true;
    const RankGroup kind = op.spec->group(op.attributes);
    const std::vector<int32_t> members = run_->layout.members(kind, rank);
    if (const auto message = message_use(op)) {
      const int32_t peer = members[static_cast<size_t>(message->peer)];
      switch (message->action) {
        case MessageUse::Action::send:
          ++sent_[{rank, peer}];
          return true;
        case MessageUse::Action::receive:
          if (sent_[{peer, rank}] == received_[{peer, rank}]) return false;
          ++received_[{peer, rank}];
          return true;
        case MessageUse::Action::finish:
          if (received_[{rank, peer}] == finished_[{rank, peer}]) return false;
          ++finished_[{rank, peer}];
          return true;
      }
    }
    const auto [found, is_new] = numbers_.try_emplace({rank, index});
    if (is_new) {
      found->second = {kind, members[0], own.collectives[kind]++};
      ++arrivals_[found->second];
    }
    return arrivals_[found->second] == members.size();
  }

  const std::shared_ptr<const RunLayout> run_;
  std::vector<Rank> ranks_;
  std::map<Way, size_t> sent_;
  std::map<Way, size_t> received_;
  std::map<Way, size_t> finished_;
  std::map<Way, Number> numbers_;  // by rank and operation
  std::map<Number, size_t> arrivals_;
};

// Collectives of groups on different queues may change places; no rank waits forever for that.
TEST(QueueOrders, ComeToTheEndOnAllRanks) {
  for (const LayoutCase& c : layouts()) {
    SCOPED_TRACE(c.name);
    for (const bool reuses_memory : {true, false}) {
      EXPECT_EQ(RunningRanks(c, reuses_memory).run(), 0U);
    }
  }
}

// The drawn orders are others than the program's: what is on other queues can come later. But in
// the layouts named here, where each collective stands right before the operation that reads its
// result.
TEST(QueueOrders, LeaveRoom) {
  std::vector<std::string> without_room;
  for (const LayoutCase& c : layouts()) {
    const std::unique_ptr<const Program> program = program_of(c, 0);
    const MemoryPlan plan = plan_memory(*program, 1);
    const std::vector<int32_t> order =
        draw_interleaving(*program, find_queue_events(*program, plan), kAsLateAsPossible);
    if (std::is_sorted(order.begin(), order.end())) without_room.push_back(c.name);
  }
  const std::vector<std::string> named = {"dense_ranks8_acc2_buckets_shared_overlap_mtp1_repeated"};
  EXPECT_EQ(without_room, named);
}

}  // namespace
}  // namespace troupe::testing
