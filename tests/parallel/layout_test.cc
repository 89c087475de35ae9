// Groups, coordinates and gradient rules of a layout, against an enumeration of all ranks written
// from the formulas of docs/layouts.md (rank = sum of coordinates times strides, leftmost fastest).
#include "parallel/layout.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "options/refusals.h"
#include "support/errors.h"

namespace troupe {
namespace {

using Ranks = std::vector<int32_t>;
using Groups = std::vector<Ranks>;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == '-') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

using Coordinates = std::map<std::string, int32_t>;

// All ranks' coordinates in one mesh, by counting up like an odometer whose first wheel is the
// leftmost dimension.
std::vector<Coordinates> enumerate(const std::string& order, const Coordinates& sizes,
                                   int32_t world) {
  std::vector<Coordinates> all;
  Coordinates now;
  for (const auto& [name, size] : sizes) now[name] = 0;
  for (int32_t rank = 0; rank < world; ++rank) {
    all.push_back(now);
    for (const std::string& name : split(order)) {
      if (++now[name] < sizes.at(name)) break;
      now[name] = 0;
    }
  }
  return all;
}

// Ranks that agree in every dimension that is not named.
Groups naive_groups(const std::vector<Coordinates>& all, const std::set<std::string>& free) {
  std::map<Coordinates, Ranks> groups;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    Coordinates key = all[rank];
    for (const std::string& name : free) key.erase(name);
    groups[key].push_back(static_cast<int32_t>(rank));
  }
  Groups result;
  for (const auto& [key, ranks] : groups) result.push_back(ranks);
  std::sort(result.begin(), result.end());
  return result;
}

std::string describe(const LayoutOptions& o) {
  return "world " + std::to_string(o.world_size) + " tp " + std::to_string(o.tensor_parallel) +
         " cp " + std::to_string(o.context_parallel) + " pp " +
         std::to_string(o.pipeline_parallel) + " ep " + std::to_string(o.expert_parallel) +
         " etp " + std::to_string(o.expert_tensor_parallel.value_or(o.tensor_parallel)) +
         " order " + o.order;
}

std::vector<Coordinates> dense_coordinates(const LayoutOptions& o) {
  const int32_t replica = o.tensor_parallel * o.context_parallel * o.pipeline_parallel;
  return enumerate(o.order,
                   {{"tp", o.tensor_parallel},
                    {"cp", o.context_parallel},
                    {"ep", 1},
                    {"dp", o.world_size / replica},
                    {"pp", o.pipeline_parallel}},
                   o.world_size);
}

std::vector<Coordinates> expert_coordinates(const LayoutOptions& o) {
  const int32_t etp = o.expert_tensor_parallel.value_or(o.tensor_parallel);
  return enumerate(o.order,
                   {{"tp", etp},
                    {"cp", 1},
                    {"ep", o.expert_parallel},
                    {"dp", o.world_size / (etp * o.expert_parallel * o.pipeline_parallel)},
                    {"pp", o.pipeline_parallel}},
                   o.world_size);
}

bool same_pipelines(const LayoutOptions& o) {
  return naive_groups(dense_coordinates(o), {"pp"}) == naive_groups(expert_coordinates(o), {"pp"});
}

void expect_like_enumeration(const LayoutOptions& o) {
  SCOPED_TRACE(describe(o));
  const Layout layout(o);
  const auto dense = dense_coordinates(o);
  const auto expert = expert_coordinates(o);
  for (int32_t rank = 0; rank < o.world_size; ++rank) {
    const Coordinates& d = dense[static_cast<size_t>(rank)];
    const Coordinates& e = expert[static_cast<size_t>(rank)];
    const DensePlace place{d.at("tp"), d.at("cp"), d.at("dp"), d.at("pp")};
    const ExpertPlace expert_place{e.at("tp"), e.at("ep"), e.at("dp"), e.at("pp")};
    ASSERT_EQ(layout.dense_place(rank), place) << "rank " << rank;
    ASSERT_EQ(layout.expert_place(rank), expert_place) << "rank " << rank;
    ASSERT_EQ(layout.rank_of(place), rank);
    ASSERT_EQ(layout.rank_of(expert_place), rank);
    ASSERT_EQ(place.pp, expert_place.pp) << "both meshes have the same stages, rank " << rank;
  }
  const auto expect = [&](RankGroup kind, const std::vector<Coordinates>& mesh,
                          const std::set<std::string>& free) {
    EXPECT_EQ(layout.groups(kind), naive_groups(mesh, free)) << name_of(kind);
  };
  expect(RankGroup::tp, dense, {"tp"});
  expect(RankGroup::cp, dense, {"cp"});
  expect(RankGroup::dp, dense, {"dp"});
  expect(RankGroup::pp, dense, {"pp"});
  expect(RankGroup::pp, expert, {"pp"});
  expect(RankGroup::dp_cp, dense, {"dp", "cp"});
  expect(RankGroup::tp_cp, dense, {"tp", "cp"});
  expect(RankGroup::tp_dp_cp, dense, {"tp", "dp", "cp"});
  expect(RankGroup::tp_pp, dense, {"tp", "pp"});
  expect(RankGroup::ep, expert, {"ep"});
  expect(RankGroup::etp, expert, {"tp"});
  expect(RankGroup::edp, expert, {"dp"});
  expect(RankGroup::etp_ep, expert, {"tp", "ep"});
  expect(RankGroup::etp_ep_pp, expert, {"tp", "ep", "pp"});

  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    if (kind == RankGroup::embedding) continue;
    std::vector<int> seen(static_cast<size_t>(o.world_size));
    for (const Ranks& group : layout.groups(kind)) {
      for (const int32_t rank : group) {
        ++seen[static_cast<size_t>(rank)];
        EXPECT_EQ(layout.members(kind, rank), group) << name_of(kind) << ", rank " << rank;
        const GroupPlace own = layout.place_in(kind, rank);
        EXPECT_EQ(own.ranks, std::ssize(group)) << name_of(kind);
        EXPECT_EQ(group[static_cast<size_t>(own.place)], rank) << name_of(kind);
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), o.world_size)
        << name_of(kind) << " does not cover every rank exactly once";
  }
}

TEST(Layout, OneRankIsEveryGroup) {
  const Layout layout({});
  for (int i = 0; i < kRankGroupCount; ++i) {
    EXPECT_EQ(layout.groups(static_cast<RankGroup>(i)), Groups{{0}});
  }
  const GradientReduction expert = layout.reduction_of(GradientClass::expert);
  EXPECT_FALSE(expert.partial || expert.copies);
}

// In the default order EP ranks are consecutive, whatever TP and CP are.
TEST(Layout, ExpertRanksAreNeighboursAcrossTensorAndContextParallel) {
  LayoutOptions o;
  o.world_size = 16;
  o.tensor_parallel = 2;
  o.context_parallel = 2;
  o.expert_parallel = 8;
  o.expert_tensor_parallel = 1;
  const Layout layout(o);
  EXPECT_EQ(layout.groups(RankGroup::ep),
            (Groups{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
  EXPECT_EQ(layout.dp(), 4);
  EXPECT_EQ(layout.edp(), 2);
  EXPECT_EQ(layout.members(RankGroup::edp, 3), (Ranks{3, 11}));
  EXPECT_EQ(layout.members(RankGroup::dp_cp, 1), (Ranks{1, 3, 5, 7, 9, 11, 13, 15}));
}

// EP 4 with DP 2: the experts' groups span TP and DP.
TEST(Layout, ExpertParallelMayExceedDataParallel) {
  LayoutOptions o;
  o.world_size = 8;
  o.tensor_parallel = 2;
  o.pipeline_parallel = 2;
  o.expert_parallel = 4;
  o.expert_tensor_parallel = 1;
  const Layout layout(o);
  EXPECT_EQ(layout.dp(), 2);
  EXPECT_EQ(layout.groups(RankGroup::ep), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(layout.groups(RankGroup::dp), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(layout.groups(RankGroup::pp), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

// Experts have fewer replicas than dense parameters where EP takes ranks of DP: their gradients are
// summed over edp, dense ones over dp x cp.
TEST(Layout, ExpertGradientsAreSummedOverTheirOwnReplicas) {
  LayoutOptions o;
  o.world_size = 16;
  o.context_parallel = 2;
  o.expert_parallel = 8;
  const Layout layout(o);
  ASSERT_EQ(layout.dp(), 8);
  ASSERT_EQ(layout.edp(), 2);
  const GradientReduction dense = layout.reduction_of(GradientClass::sliced);
  const GradientReduction expert = layout.reduction_of(GradientClass::expert);
  EXPECT_EQ(dense.replicas, RankGroup::dp_cp);
  EXPECT_EQ(expert.replicas, RankGroup::edp);
}

// Without EP and with ETP = TP, experts are reduced like dense parameters.
TEST(Layout, ExpertsWithoutExpertParallelismAreReducedLikeDense) {
  LayoutOptions o;
  o.world_size = 24;
  o.tensor_parallel = 2;
  o.context_parallel = 3;
  o.pipeline_parallel = 2;
  const Layout layout(o);
  EXPECT_EQ(layout.groups(RankGroup::edp), layout.groups(RankGroup::dp_cp));
}

// Norms of heads are summed over TP even without sequence parallelism, other replicated
// parameters only with it.
TEST(Layout, PartialSumsOverTensorParallel) {
  LayoutOptions o;
  o.world_size = 4;
  o.tensor_parallel = 2;
  for (const bool sequence_parallel : {false, true}) {
    o.sequence_parallel = sequence_parallel;
    const Layout layout(o);
    EXPECT_EQ(layout.reduction_of(GradientClass::head_norm).partial, RankGroup::tp);
    EXPECT_EQ(layout.reduction_of(GradientClass::replicated).partial.has_value(),
              sequence_parallel);
    EXPECT_FALSE(layout.reduction_of(GradientClass::sliced).partial);
    EXPECT_FALSE(layout.reduction_of(GradientClass::expert).partial);
  }
}

TEST(Layout, EmbeddingGroupHoldsThePlacesThatWereNamed) {
  LayoutOptions o;
  o.world_size = 8;
  o.pipeline_parallel = 4;
  EXPECT_EQ(Layout(o).groups(RankGroup::embedding), (Groups{{0, 6}, {1, 7}}));
  o.embedding_places = {0, 2, 3};
  const Layout layout(o);
  EXPECT_EQ(layout.groups(RankGroup::embedding), (Groups{{0, 4, 6}, {1, 5, 7}}));
  EXPECT_EQ(layout.members(RankGroup::embedding, 2), Ranks{});
  EXPECT_EQ(layout.reduction_of(GradientClass::embedding).copies, RankGroup::embedding);
  o.embedding_places = {0};
  EXPECT_FALSE(Layout(o).reduction_of(GradientClass::embedding).copies);
}

TEST(Layout, KeyValueHeadsAreSharedByNeighbours) {
  LayoutOptions o;
  o.world_size = 16;
  o.tensor_parallel = 8;
  const auto replicas = [&](int32_t rank, int32_t heads) {
    o.key_value_heads = heads;
    return Layout(o).members(RankGroup::kv_replicas, rank);
  };
  EXPECT_EQ(replicas(5, 2), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(replicas(13, 4), (Ranks{12, 13}));
  EXPECT_EQ(replicas(3, 8), (Ranks{3}));
  EXPECT_EQ(replicas(3, 16), (Ranks{3}));
}

// Optimizer instances: contiguous blocks of dp-cp, and of edp.
TEST(Layout, OptimizerInstancesAreContiguousBlocks) {
  LayoutOptions o;
  o.world_size = 16;
  o.tensor_parallel = 2;
  o.expert_tensor_parallel = 1;
  o.expert_parallel = 2;
  o.optimizer_instances = 2;
  const Layout layout(o);
  EXPECT_EQ(layout.members(RankGroup::dp_cp_within_instance, 5), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(layout.members(RankGroup::dp_cp_across_instances, 5), (Ranks{5, 13}));
  EXPECT_EQ(layout.members(RankGroup::edp_within_instance, 5), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(layout.members(RankGroup::edp_across_instances, 5), (Ranks{5, 13}));
  EXPECT_EQ(layout.groups(RankGroup::optimizer_instance),
            (Groups{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    for (int32_t rank = 0; rank < o.world_size; ++rank) {
      const Ranks group = layout.members(kind, rank);
      const GroupPlace own = layout.place_in(kind, rank);
      ASSERT_EQ(own.ranks, std::ssize(group)) << name_of(kind);
      if (group.empty()) continue;
      EXPECT_EQ(group[static_cast<size_t>(own.place)], rank) << name_of(kind);
    }
  }
}

LayoutOptions on_nodes(int32_t world, int32_t etp, int32_t ep, int32_t node_ranks) {
  LayoutOptions o;
  o.world_size = world;
  o.expert_tensor_parallel = etp;
  o.expert_parallel = ep;
  o.dispatch_node_ranks = node_ranks;
  return o;
}

TEST(Layout, RanksThatShareExpertsAreDividedByNode) {
  LayoutOptions o = on_nodes(16, 1, 8, 4);
  const auto within = [&](int32_t rank) {
    return Layout(o).members(RankGroup::etp_ep_within_node, rank);
  };
  const auto across = [&](int32_t rank) {
    return Layout(o).members(RankGroup::etp_ep_across_nodes, rank);
  };
  EXPECT_EQ(within(6), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(across(6), (Ranks{2, 6}));
  EXPECT_EQ(across(15), (Ranks{11, 15}));
  EXPECT_EQ(Layout(o).place_in(RankGroup::etp_ep_within_node, 6).place, 2);
  EXPECT_EQ(Layout(o).place_in(RankGroup::etp_ep_across_nodes, 6).place, 1);
  // Neighbours in a group are two ranks apart, so a node has two of them.
  o.order = "dp-ep-tp-cp-pp";
  EXPECT_EQ(within(6), (Ranks{4, 6}));
  EXPECT_EQ(across(6), (Ranks{2, 6, 10, 14}));
  o.dispatch_node_ranks = 0;
  EXPECT_EQ(within(6), (Ranks{0, 2, 4, 6, 8, 10, 12, 14}));
  EXPECT_EQ(across(6), (Ranks{6}));
  o = on_nodes(16, 1, 4, 8);
  EXPECT_EQ(within(6), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(across(6), (Ranks{6}));
}

// Draws whole numbers below a bound, the same ones in every run.
class Draw {
 public:
  explicit Draw(uint32_t stream) : stream_(stream) {}
  int32_t below(int32_t bound) {
    return static_cast<int32_t>(
        random_below(static_cast<uint64_t>(bound), 7, RandomStream::test, stream_, next_++));
  }
  // A divisor of `number`.
  int32_t divisor(int32_t number) {
    std::vector<int32_t> divisors;
    for (int32_t i = 1; i <= number; ++i) {
      if (number % i == 0) divisors.push_back(i);
    }
    return divisors[static_cast<size_t>(below(static_cast<int32_t>(divisors.size())))];
  }

 private:
  uint32_t stream_;
  uint64_t next_ = 0;
};

TEST(Layout, RandomLayoutsAgreeWithEnumeration) {
  Draw draw(1);
  int with_pipeline_inside = 0;
  for (int i = 0; i < 400; ++i) {
    LayoutOptions o;
    o.world_size = 1 + draw.below(64);
    o.pipeline_parallel = draw.divisor(o.world_size);
    const int32_t stage = o.world_size / o.pipeline_parallel;
    o.tensor_parallel = draw.divisor(stage);
    o.context_parallel = draw.divisor(stage / o.tensor_parallel);
    o.expert_parallel = draw.divisor(stage);
    o.expert_tensor_parallel = draw.divisor(stage / o.expert_parallel);
    std::vector<std::string> names = {"tp", "cp", "ep", "dp", "pp"};
    for (size_t j = names.size(); j > 1; --j) {
      std::swap(names[j - 1], names[static_cast<size_t>(draw.below(static_cast<int32_t>(j)))]);
    }
    o.order.clear();
    for (const std::string& name : names) o.order += (o.order.empty() ? "" : "-") + name;
    const bool inside = names.back() != "pp" && o.pipeline_parallel > 1;
    const bool same_dp =
        o.tensor_parallel * o.context_parallel == o.expert_parallel * *o.expert_tensor_parallel;
    if (inside && !(same_dp && same_pipelines(o))) {
      EXPECT_NE(try_layout(o).refusal(), nullptr) << describe(o);
      o.order = std::string(kDefaultRankOrder);
    } else if (inside) {
      ++with_pipeline_inside;
    }
    expect_like_enumeration(o);
    if (HasFailure()) break;
  }
  EXPECT_GT(with_pipeline_inside, 5) << "the draw misses orders with pp inside";
}

void expect_refused(const LayoutOptions& options, const std::vector<std::string>& phrases) {
  const OrRefusal<Layout> answer = try_layout(options);
  ASSERT_NE(answer.refusal(), nullptr) << "accepted, instead of: " << phrases.front();
  const std::string message = text_of(*answer.refusal());
  for (const std::string& phrase : phrases) {
    EXPECT_NE(message.find(phrase), std::string::npos)
        << "'" << phrase << "' is not in: " << message;
  }
}

TEST(Layout, RefusalsNameTheRuleAndWhatWouldDo) {
  LayoutOptions o;
  o.world_size = 12;
  o.tensor_parallel = 4;
  o.pipeline_parallel = 2;
  expect_refused(o, {"--ranks 12", "TP 4 x CP 1 x PP 2 = 8", "--ranks 8 or 16"});
  o = {};
  o.world_size = 12;
  o.expert_parallel = 8;
  expect_refused(o, {"ETP 1 x EP 8 x PP 1 = 8", "--ranks 8 or 16", "a replica of 6 or 12 ranks"});
  o = {};
  o.world_size = 2;
  o.tensor_parallel = 4;
  expect_refused(o, {"--ranks 2", "Nearest: --ranks 4; or a replica of 2 ranks."});
  o = {};
  o.tensor_parallel = 0;
  expect_refused(o, {"--tensor-model-parallel-size takes a number from 1", "not 0"});
  o = {};
  o.world_size = 1048577;
  expect_refused(o, {"--ranks takes a number from 1 to 1048576, not 1048577."});
  o = {};
  o.order = "tp-cp-xp";
  expect_refused(o, {"--rank-order tp-cp-xp", "'xp' is no dimension"});
  o.order = "tp-tp";
  expect_refused(o, {"tp stands there twice"});
  o = {};
  o.world_size = 4;
  o.order = "tp-cp-ep-pp";
  expect_refused(o, {"dp is missing although its size is 4"});
  o = {};
  o.world_size = 8;
  o.pipeline_parallel = 2;
  o.expert_parallel = 2;
  o.order = "tp-cp-ep-pp-dp";
  expect_refused(o, {"unless pp comes last", "DP is 4 and EDP is 2"});
  o.world_size = 16;
  o.tensor_parallel = o.context_parallel = 2;
  o.expert_parallel = 1;
  expect_refused(o, {"unless pp comes last", "or ETP x EP equal to TP x CP = 4."});
  o = {};
  o.world_size = 8;
  o.expert_parallel = 4;
  o.optimizer_instances = 4;
  expect_refused(o, {"--num-distributed-optimizer-instances 4", "EDP = 2", "nearest: 2"});
  o = {};
  o.world_size = 3;
  o.optimizer_instances = 2;
  expect_refused(o, {"--num-distributed-optimizer-instances 2", "DP x CP = 3", "nearest: 1"});
}

TEST(Layout, RefusesNodesThatDivideExpertsUnevenly) {
  // 3, 3 and 2 of 8 ranks.
  expect_refused(on_nodes(8, 1, 8, 3), {"--moe-dispatch-ranks-per-node 3", "the 8 ranks",
                                        "ETP 1 x EP 8", "nearest: 2 or 4"});
  // Groups of four ranks begin in the middle of a node: 4, 2 and 2, 4.
  expect_refused(on_nodes(12, 1, 4, 6), {"--moe-dispatch-ranks-per-node 6", "nearest: 4 or 8"});
  // Three of six: both slices of one expert and one of the next.
  expect_refused(on_nodes(6, 2, 3, 3), {"--moe-dispatch-ranks-per-node 3", "nearest: 2 or 6"});
  expect_refused(on_nodes(8, 1, 8, -1), {"--moe-dispatch-ranks-per-node", "not -1"});
  for (const int32_t ranks : {1, 2, 4, 8, 16}) {
    EXPECT_EQ(try_layout(on_nodes(8, 1, 8, ranks)).refusal(), nullptr) << ranks;
  }
}

TEST(Layout, SizesReachTheLargestThatIsNamed) {
  LayoutOptions o;
  o.world_size = o.tensor_parallel = 1048576;
  EXPECT_EQ(try_layout(o).refusal(), nullptr);
}

TEST(Layout, DimensionsOfSizeOneMayBeLeftOutOfTheOrder) {
  LayoutOptions o;
  o.world_size = 8;
  o.tensor_parallel = 2;
  o.order = "dp-tp";
  const Layout layout(o);
  EXPECT_EQ(layout.members(RankGroup::dp, 0), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(layout.members(RankGroup::tp, 0), (Ranks{0, 4}));
}

}  // namespace
}  // namespace troupe
