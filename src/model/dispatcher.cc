#include "model/dispatcher.h"

#include <algorithm>
#include <array>
#include <cmath>
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

class AllToAllDispatcher : public Dispatcher {
 public:
  AllToAllDispatcher(Builder& builder, const DispatchPlanAttributes& plan,
                     const LocalExpertsAttributes& local, int64_t expected_rows, int64_t most_rows)
      : builder_(builder),
        plan_(plan),
        local_(local),
        expected_rows_(expected_rows),
        most_rows_(most_rows) {}

  DispatchedTokens dispatch(ValueId rows, ValueId probabilities, ValueId experts) override {
    const auto top_k = static_cast<int32_t>(builder_.value(experts).shape[1]);
    // Each row that comes is one of an expert at least.
    const int64_t all_tokens = plan_.ranks() * builder_.value(rows).shape[0];
    exchange_ = exchange_counts(builder_, dispatch_plan(builder_, experts, plan_, "dispatch"),
                                {.group = kDispatchGroup,
                                 .copies = std::min(plan_.ranks(), top_k * plan_.slices),
                                 .expected_received = expected_rows_,
                                 .most_received = most_rows_ < all_tokens ? most_rows_ : 0},
                                "received");
    DispatchedTokens tokens;
    tokens.rows = send_rows(builder_, rows, exchange_, "received_tokens");
    tokens.probabilities = send_rows(builder_, probabilities, exchange_, "received_router_weights");
    const ValueId chosen = send_rows(builder_, experts, exchange_, "received_chosen");
    tokens.experts = local_experts(builder_, chosen, {}, local_, "local_experts");
    return tokens;
  }
  ValueId collect(ValueId partial) override {
    return return_rows(builder_, partial, exchange_, "moe_sum");
  }

 private:
  Builder& builder_;
  const DispatchPlanAttributes plan_;
  const LocalExpertsAttributes local_;
  const int64_t expected_rows_;
  const int64_t most_rows_;
  RowExchange exchange_;
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

// The members of a dispatch group, in ascending order, by what they hold.
DispatchPlanAttributes plan_of(const ModelConfig& config, const ModelPart& part) {
  const Layout& layout = part.layout();
  DispatchPlanAttributes plan{
      .experts = config.num_experts, .parts = layout.ep(), .slices = layout.etp()};
  const std::vector<int32_t> members = layout.members(kDispatchGroup, part.rank);
  // Of two members that follow each other, either the slice or the experts are the same.
  const bool slices_first =
      plan.slices > 1 && layout.expert_place(members[0]).ep == layout.expert_place(members[1]).ep;
  plan.part_stride = slices_first ? plan.slices : 1;
  plan.slice_stride = slices_first ? 1 : plan.parts;
  return plan;
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
  const int32_t count = config.num_experts / part.layout().ep();
  const LocalExpertsAttributes local{.first = part.expert().ep * count, .count = count};
  const double copies = expected_copies(config, part.layout().ep(), part.layout().etp());
  const int64_t rows = std::llround(copies * static_cast<double>(load.tokens));
  switch (kind) {
    case TokenDispatcher::allgather:
      return std::make_unique<AllGatherDispatcher>(builder, ranks, local);
    case TokenDispatcher::alltoall:
      return std::make_unique<AllToAllDispatcher>(builder, plan_of(config, part), local, rows,
                                                  load.most_rows);
    case TokenDispatcher::flex:
      return std::make_unique<FlexDispatcher>(builder, plan_of(config, part), local, rows);
  }
  TROUPE_CHECK(false, "a dispatcher");
  return nullptr;
}

}  // namespace troupe
