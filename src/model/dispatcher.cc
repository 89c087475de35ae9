#include "model/dispatcher.h"

#include "base/error.h"
#include "ops/all_gather/all_gather.h"
#include "ops/local_experts/local_experts.h"
#include "ops/reduce_scatter/reduce_scatter.h"

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

std::unique_ptr<Dispatcher> make_dispatcher(Builder& builder, const ModelConfig& config,
                                            const ModelPart& part, TokenDispatcher kind) {
  const int32_t ranks = dispatch_ranks(part);
  if (ranks == 1) return std::make_unique<NoDispatcher>();
  const int32_t count = config.num_experts / part.layout().ep();
  const LocalExpertsAttributes local{.first = part.expert().ep * count, .count = count};
  switch (kind) {
    case TokenDispatcher::allgather:
      return std::make_unique<AllGatherDispatcher>(builder, ranks, local);
    default:
      break;
  }
  TROUPE_CHECK(false, "a dispatcher");
  return nullptr;
}

}  // namespace troupe
