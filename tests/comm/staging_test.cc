// Where terms of sums lie that GPUs bring each other, and the memory that staged collectives need:
// what all members must agree on, and what kernels may rely on.
#include "comm/staging.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/all_reduce/all_reduce.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/optimizer/shards/shards.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "passes/memory_plan.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

ShareOf shares(int64_t elements, int ranks) {
  return [elements, ranks](int place) { return share_of(elements, place, ranks); };
}
ShareOf shards(const Shape& shape, int ranks) {
  return [shape, ranks](int place) { return shard_of(shape, {.place = place, .count = ranks}); };
}

// Every element of every member's share is in one round, once; within a round nothing overlaps, and
// all of it is in the memory that was asked for.
void expect_rounds(const std::vector<ShareOf>& tensors, DType dtype, int ranks) {
  const auto size = static_cast<int64_t>(size_of(dtype));
  const auto bytes = static_cast<int64_t>(staged_sum_bytes(tensors, dtype, ranks));
  EXPECT_LE(bytes, kMostStagedTerms);
  std::vector<std::vector<int64_t>> covered(tensors.size(),
                                            std::vector<int64_t>(static_cast<size_t>(ranks), 0));
  for (const auto& round : staged_rounds(tensors, dtype, ranks)) {
    int64_t end = 0;
    for (const StagedTerms& terms : round) {
      EXPECT_EQ(terms.offset % kStagingAlignment, 0);
      EXPECT_EQ(terms.stride % kStagingAlignment, 0);
      EXPECT_GE(terms.stride, terms.elements * size);
      EXPECT_GE(terms.offset, end) << "terms overlap";
      end = terms.offset + ranks * terms.stride;
      EXPECT_LE(end, bytes);
      int64_t largest = 0;
      for (int place = 0; place < ranks; ++place) {
        const IndexRange share = tensors[terms.tensor](place);
        largest = std::max(largest, share.end - share.begin);
        const IndexRange part = part_of(terms, share);
        int64_t& before = covered[terms.tensor][static_cast<size_t>(place)];
        EXPECT_LE(part.end - part.begin, terms.elements);
        if (part.end == part.begin) continue;
        EXPECT_EQ(part.begin, share.begin + before) << "in order, and none left out";
        before += part.end - part.begin;
      }
      EXPECT_LE(terms.first + terms.elements, largest) << "room for what no member has";
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int place = 0; place < ranks; ++place) {
      const IndexRange share = tensors[i](place);
      EXPECT_EQ(covered[i][static_cast<size_t>(place)], share.end - share.begin)
          << "tensor " << i << " place " << place << " of " << ranks;
    }
  }
}

TEST(Staging, RoundsCoverEveryShareOnce) {
  for (const int ranks : {2, 3, 4, 7, 8, 32}) {
    for (const DType dtype : kSummedDtypes) {
      expect_rounds({shares(1, ranks), shares(0, ranks), shares(1000, ranks), shares(17, ranks),
                     shards({5, 3}, ranks), shards({40, 31}, ranks)},
                    dtype, ranks);
      // More than a round holds.
      expect_rounds({shares(100, ranks), shares(int64_t{45} << 20, ranks), shares(33, ranks),
                     shards({1000, 30'011}, ranks)},
                    dtype, ranks);
    }
  }
  EXPECT_TRUE(staged_rounds({}, DType::f32, 2).empty());
  EXPECT_EQ(staged_sum_bytes(std::span<const ShareOf>{}, DType::f32, 2), 0U);
}

TEST(Staging, SmallSumsTakeWhatTheirTermsTake) {
  const std::array<ShareOf, 2> tensors = {shares(64, 2), shares(32, 2)};
  // 32 and 16 elements of two ranks, in f32.
  EXPECT_EQ(staged_sum_bytes(tensors, DType::f32, 2), 2 * 32 * 4U + 2 * 16 * 4U);
}

// Every member meets the other one of each of its ways, in order. No member may be left waiting.
void expect_all_ways_met(const std::vector<std::vector<int64_t>>& messages) {
  const auto ranks = static_cast<int>(messages.size());
  std::vector<std::vector<StagedWay>> left;
  size_t count = 0;
  for (int place = 0; place < ranks; ++place) {
    left.push_back(staged_ways(messages, place));
    count += left.back().size();
  }
  std::vector<size_t> next(static_cast<size_t>(ranks), 0);
  const auto at = [&](int place) -> const StagedWay* {
    const auto i = static_cast<size_t>(place);
    return next[i] < left[i].size() ? &left[i][next[i]] : nullptr;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int place = 0; place < ranks; ++place) {
      const StagedWay* const way = at(place);
      if (way == nullptr) continue;
      const int other = way->from == place ? way->to : way->from;
      const StagedWay* const theirs = at(other);
      if (theirs == nullptr || !(*theirs == *way)) continue;
      ++next[static_cast<size_t>(place)];
      ++next[static_cast<size_t>(other)];
      count -= 2;
      moved = true;
    }
  }
  EXPECT_EQ(count, 0U) << "members wait for each other in a circle";
}

TEST(Staging, MembersMeetOnTheirWaysInNoCircle) {
  expect_all_ways_met({{0, 3}, {3, 0}});
  EXPECT_EQ(staged_ways({{0, 3}, {3, 0}}, 0), staged_ways({{0, 3}, {3, 0}}, 1));
  for (size_t ranks = 2; ranks <= 8; ++ranks) {
    std::vector<std::vector<int64_t>> ring(ranks, std::vector<int64_t>(ranks, 0));
    for (size_t i = 0; i < ranks; ++i) ring[i][(i + 1) % ranks] = 1;
    expect_all_ways_met(ring);  // forward in a pipeline with several chunks
    for (size_t i = 0; i < ranks; ++i) ring[(i + 1) % ranks][i] = 1;
    expect_all_ways_met(ring);  // and back
    std::vector<std::vector<int64_t>> all(ranks, std::vector<int64_t>(ranks, 1));
    for (size_t i = 0; i < ranks; ++i) all[i][i] = 0;
    expect_all_ways_met(all);
    EXPECT_EQ(staged_ways(all, 1).size(), 2 * (ranks - 1));
  }
}

struct StagedProgram {
  explicit StagedProgram(int ranks) {
    constexpr RankGroup kGroup = RankGroup::world;
    const ValueId x = builder.input("x", DType::bf16, {130, 256});
    const ValueId all = builder.input("all", DType::f32, {130 * ranks, 5});
    all_gather(builder, x, {.group = kGroup, .ranks = ranks}, "gathered");
    reduce_scatter(builder, all, {.group = kGroup, .ranks = ranks}, "scattered");
    sum_over_ranks(builder, x, {.group = kGroup}, "summed");
    const ValueId indices = builder.input("indices", DType::i32, {130, 2});
    const DispatchPlan plan = dispatch_plan(builder, indices,
                                            {.experts = 2 * ranks,
                                             .parts = ranks,
                                             .slices = 1,
                                             .part_stride = 1,
                                             .slice_stride = ranks},
                                            "plan");
    const RowExchange exchange =
        exchange_counts(builder, plan, {.group = kGroup, .copies = 2}, "offsets");
    return_rows(builder, send_rows(builder, x, exchange, "sent"), exchange, "returned");
    const std::array both = {x, indices};
    const PushedRows pushed = push_rows(builder, both, plan, {.group = kGroup}, "pushed");
    push_rows_back(builder, pushed.rows[0], plan, pushed.received, {.group = kGroup}, "back");
    const ExchangeHeadsAttributes heads{.group = kGroup,
                                        .chunks = {.ranks = ranks, .rank = 1},
                                        .batch = 2,
                                        .sequence = 6 * ranks,
                                        .heads = 2 * ranks,
                                        .groups = ranks,
                                        .head_dim = 64};
    const ValueId by_sequence =
        builder.input("by_sequence", DType::bf16, {2 * 6, int64_t{4} * ranks * 64});
    heads_to_sequence(builder, sequence_to_heads(builder, by_sequence, heads, "by_heads"), heads,
                      "again");
    const ValueId counts = builder.input("counts", DType::i32, {37});
    prefix_sum(builder, counts, {}, {.group = kGroup}, "counted");
    const std::array metrics = {builder.metric("a", DType::f64, {7, 3}),
                                builder.metric("b", DType::f32, {1 << 20, 50})};
    all_reduce(builder, metrics, {.group = kGroup});
    const ShardedTensors cut{.cut = {metrics.begin(), metrics.end()}, .owned = {}, .owners = {}};
    reduce_shards(builder, cut, kGroup);
    gather_shards(builder, cut, kGroup);
  }

  Program program{std::make_shared<const StateTable>()};
  Builder builder{program};
};

// What each collective needs beside its own scratch memory, by its kind.
TEST(Staging, IsPlanned) {
  constexpr int kRanks = 4;
  StagedProgram staged(kRanks);
  Program& program = staged.program;
  const uint64_t without = plan_memory(program, 1, Device::cuda).scratch_bytes();
  StagedGroups groups{};
  groups[static_cast<size_t>(RankGroup::world)] = kRanks;
  program.set_staged_groups(groups);
  std::map<std::string, uint64_t> wanted;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const KernelNeeds needs = op.spec->cuda({program, op}, DeviceTraits()).needs;
    wanted[op.spec->name] = MemoryPlan::aligned(needs.staging);
  }
  constexpr uint64_t kRows = 130 * 256 * 2;  // bytes of a rank's tokens
  EXPECT_EQ(wanted.at("all_gather"), 0U) << "what comes goes to its place";
  EXPECT_EQ(wanted.at("gather_shards"), 0U);
  EXPECT_EQ(wanted.at("push_rows"), kRanks * kRows);
  EXPECT_EQ(wanted.at("push_rows_back"), kRanks * kRows);
  EXPECT_EQ(wanted.at("send_rows"), 2 * kRanks * kRows);
  EXPECT_EQ(wanted.at("return_rows"), 2 * kRanks * kRows);
  EXPECT_EQ(wanted.at("exchange_counts"), kRanks * 64U);
  EXPECT_EQ(wanted.at("prefix_sum"), kRanks * 192U);
  EXPECT_EQ(wanted.at("sequence_to_heads"), 2 * 12 * 4 * kRanks * 64 * 2U);
  EXPECT_EQ(wanted.at("reduce_scatter"), kRanks * 2624U) << "130 x 5 x 4 bytes of each, aligned";
  EXPECT_EQ(wanted.at("dispatch_plan"), 0U) << "of one rank";
  EXPECT_EQ(wanted.at("all_reduce"), static_cast<uint64_t>(kMostStagedTerms)) << "in rounds";
  const MemoryPlan plan = plan_memory(program, 1, Device::cuda);
  EXPECT_EQ(plan.scratch_bytes_of_queue[static_cast<size_t>(Queue::communication)],
            static_cast<uint64_t>(kMostStagedTerms));
  EXPECT_EQ(without, 0U);
  EXPECT_EQ(plan_memory(program, 1).scratch_bytes(),
            plan_memory(StagedProgram(kRanks).program, 1).scratch_bytes())
      << "on a CPU nothing is staged";
}

}  // namespace
}  // namespace troupe
