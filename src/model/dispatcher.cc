#include "model/dispatcher.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "model/token_copies.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "ops/exchange/reduce_scatter/reduce_scatter.h"
#include "ops/routing/dispatch_plan/dispatch_plan.h"
#include "ops/routing/local_experts/local_experts.h"

namespace troupe {
namespace {

constexpr RankGroup kDispatchGroup = RankGroup::etp_ep;

// All experts are here.
class NoDispatcher : public Dispatcher {
 public:
  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    return {.rows = rows, .probabilities = probabilities, .experts = experts};
  }
  ValueId collect(ValueId partial) override { return partial; }
};

class AllGatherDispatcher : public Dispatcher {
 public:
  AllGatherDispatcher(Builder& builder, int32_t ranks, const LocalExpertsAttributes& local)
      : builder_(builder), ranks_(ranks), local_(local) {}

  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    const AllGatherAttributes attributes{.group = kDispatchGroup, .ranks = ranks_};
    DispatchedTokens tokens;
    tokens.rows = all_gather(builder_, rows, attributes, "all_tokens");
    tokens.probabilities = all_gather(builder_, probabilities, attributes, "all_router_weights");
    const ValueId chosen = all_gather(builder_, experts, attributes, "all_chosen");
    tokens.experts = local_experts(builder_, chosen, {}, local_, "local_experts");
    return tokens;
  }
  ValueId collect(ValueId partial) override {
    return reduce_scatter(builder_, partial, {.group = kDispatchGroup, .ranks = ranks_}, "moe_sum");
  }

 private:
  Builder& builder_;
  const int32_t ranks_;
  const LocalExpertsAttributes local_;
};

// What one exchange of rows between the ranks of a group has to know.
struct RowStep {
  RankGroup group = kDispatchGroup;
  DispatchPlanAttributes plan;  // of the experts that the indices count
  LocalExpertsAttributes local;
  int64_t expected_rows = 0;
  int64_t most_rows = 0;
  std::string prefix = {};  // of names of what comes
};

class AllToAllDispatcher : public Dispatcher {
 public:
  AllToAllDispatcher(Builder& builder, RowStep step) : builder_(builder), step_(std::move(step)) {}

  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    const DispatchPlanAttributes& plan = step_.plan;
    const auto top_k = static_cast<int32_t>(builder_.value(experts).shape[1]);
    // Each row that comes is one of an expert at least.
    const int64_t all_tokens = plan.ranks() * builder_.value(rows).shape[0];
    exchange_ =
        exchange_counts(builder_, dispatch_plan(builder_, experts, plan, named("dispatch")),
                        {.group = step_.group,
                         .copies = std::min(plan.ranks(), top_k * plan.slices),
                         .expected_received = step_.expected_rows,
                         .most_received = step_.most_rows < all_tokens ? step_.most_rows : 0},
                        named("received"));
    DispatchedTokens tokens;
    tokens.rows = send_rows(builder_, rows, exchange_, named("received_tokens"));
    tokens.probabilities =
        send_rows(builder_, probabilities, exchange_, named("received_router_weights"));
    const ValueId chosen = send_rows(builder_, experts, exchange_, named("received_chosen"));
    tokens.experts = local_experts(builder_, chosen, {}, step_.local, named("local_experts"));
    return tokens;
  }
  ValueId collect(ValueId partial) override {
    return return_rows(builder_, partial, exchange_, named("moe_sum"));
  }

 private:
  std::string named(const char* name) const { return step_.prefix + name; }

  Builder& builder_;
  const RowStep step_;
  RowExchange exchange_;
};

// To a rank of each node, and on from there. What the first step calls local experts are those of
// the node.
class HierarchicalDispatcher : public Dispatcher {
 public:
  HierarchicalDispatcher(Builder& builder, RowStep across_nodes, RowStep within_node)
      : across_(builder, std::move(across_nodes)), within_(builder, std::move(within_node)) {}

  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    const DispatchedTokens node = across_.dispatch(rows, probabilities, experts);
    return within_.dispatch(node.rows, node.probabilities, node.experts);
  }
  ValueId collect(ValueId partial) override { return across_.collect(within_.collect(partial)); }

 private:
  AllToAllDispatcher across_;
  AllToAllDispatcher within_;
};

class FlexDispatcher : public Dispatcher {
 public:
  FlexDispatcher(Builder& builder, const DispatchPlanAttributes& plan,
                 const LocalExpertsAttributes& local, int64_t expected_rows)
      : builder_(builder),
        attributes_(plan),
        push_{.group = kDispatchGroup, .expected_received = expected_rows},
        local_(local) {}

  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    plan_ = dispatch_plan(builder_, experts, attributes_, "dispatch");
    const std::array tensors = {rows, probabilities, experts};
    const PushedRows pushed = push_rows(builder_, tensors, plan_, push_, "pushed");
    received_ = pushed.received;
    return {.rows = pushed.rows[0],
            .probabilities = pushed.rows[1],
            .experts = local_experts(builder_, pushed.rows[2], received_, local_, "local_experts")};
  }
  ValueId collect(ValueId partial) override {
    return push_rows_back(builder_, partial, plan_, received_, push_, "moe_sum");
  }

 private:
  Builder& builder_;
  const DispatchPlanAttributes attributes_;
  const PushRowsAttributes push_;
  const LocalExpertsAttributes local_;
  DispatchPlan plan_;
  ValueId received_;
};

// Of members in ascending order two that follow each other have either the same slice or the same
// experts.
DispatchPlanAttributes plan_of(int32_t experts, int32_t parts, int32_t slices, bool slices_first) {
  return {.experts = experts,
          .parts = parts,
          .slices = slices,
          .part_stride = slices_first ? slices : 1,
          .slice_stride = slices_first ? 1 : parts};
}

bool are_slices_first(const ModelPart& part) {
  const Layout& layout = part.layout();
  if (layout.etp() == 1) return false;
  const std::vector<int32_t> members = layout.members(kDispatchGroup, part.rank);
  return layout.expert_place(members[0]).ep == layout.expert_place(members[1]).ep;
}

// From all ranks to all: what `alltoall` and `flex` do.
RowStep single_step(const ModelConfig& config, const ModelPart& part, const DispatchLoad& load) {
  const Layout& layout = part.layout();
  const auto experts = static_cast<int32_t>(load.experts);
  const int32_t count = experts / layout.ep();
  const double copies = expected_copies(config, layout.ep(), layout.etp());
  return {.plan = plan_of(experts, layout.ep(), layout.etp(), are_slices_first(part)),
          .local = {.first = part.expert().ep * count, .count = count},
          .expected_rows = std::llround(copies * static_cast<double>(load.tokens)),
          .most_rows = load.most_rows};
}

std::unique_ptr<Dispatcher> make_hierarchical(Builder& builder, const ModelConfig& config,
                                              const ModelPart& part, const DispatchLoad& load) {
  const Layout& layout = part.layout();
  RowStep within = single_step(config, part, load);
  const GroupPlace node = layout.place_in(RankGroup::etp_ep_within_node, part.rank);
  if (node.ranks == 1 || node.ranks == dispatch_ranks(part)) {
    return std::make_unique<AllToAllDispatcher>(builder, std::move(within));
  }
  // A node has all slices of some experts or some slices of an expert, where slices come first;
  // else some experts of one slice, or all experts of some slices (Layout::check_nodes).
  const bool slices_first = are_slices_first(part);
  const int32_t parts =
      slices_first ? std::max(1, node.ranks / layout.etp()) : std::min(node.ranks, layout.ep());
  const int32_t slices = node.ranks / parts;
  const int32_t nodes_of_experts = layout.ep() / parts;
  const int32_t nodes_of_slices = layout.etp() / slices;
  const auto all_experts = static_cast<int32_t>(load.experts);
  const int32_t experts = all_experts / nodes_of_experts;
  const double copies = expected_copies(config, nodes_of_experts, nodes_of_slices);
  RowStep across{.group = RankGroup::etp_ep_across_nodes,
                 .plan = plan_of(all_experts, nodes_of_experts, nodes_of_slices, slices_first),
                 .local = {.first = part.expert().ep / parts * experts, .count = experts},
                 .expected_rows = std::llround(copies * static_cast<double>(load.tokens)),
                 .most_rows = std::numeric_limits<int64_t>::max(),
                 .prefix = "node_"};
  within.group = RankGroup::etp_ep_within_node;
  within.plan = plan_of(experts, parts, slices, slices_first);
  within.local.first = part.expert().ep % parts * within.local.count;
  return std::make_unique<HierarchicalDispatcher>(builder, std::move(across), std::move(within));
}

}  // namespace

std::string_view name_of(TokenDispatcher dispatcher) {
  switch (dispatcher) {
    case TokenDispatcher::allgather:
      return "allgather";
    case TokenDispatcher::alltoall:
      return "alltoall";
    case TokenDispatcher::flex:
      return "flex";
    case TokenDispatcher::hierarchical:
      return "hierarchical";
  }
  return {};
}

int32_t dispatch_ranks(const ModelPart& part) {
  return part.layout().etp() * part.layout().ep();
}

double expected_copies(const ModelConfig& config, int32_t ep, int32_t etp) {
  TokenChoices choices{.experts = config.num_experts, .top_k = config.moe_router_topk};
  if (config.moe_router_num_groups > 0) {
    choices.groups = config.moe_router_num_groups;
    choices.group_topk = config.moe_router_group_topk;
  }
  return etp * parts_of_token(choices, ep);
}

std::unique_ptr<Dispatcher> make_dispatcher(Builder& builder, const ModelConfig& config,
                                            const ModelPart& part, TokenDispatcher kind,
                                            const DispatchLoad& load) {
  const int32_t ranks = dispatch_ranks(part);
  if (ranks == 1) return std::make_unique<NoDispatcher>();
  RowStep step = single_step(config, part, load);
  switch (kind) {
    case TokenDispatcher::allgather:
      return std::make_unique<AllGatherDispatcher>(builder, ranks, step.local);
    case TokenDispatcher::alltoall:
      return std::make_unique<AllToAllDispatcher>(builder, std::move(step));
    case TokenDispatcher::flex:
      return std::make_unique<FlexDispatcher>(builder, step.plan, step.local, step.expected_rows);
    case TokenDispatcher::hierarchical:
      return make_hierarchical(builder, config, part, load);
  }
  TROUPE_CHECK(false, "a dispatcher");
  return nullptr;
}

}  // namespace troupe
