#include "model/blocks/moe.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "model/context_parallel.h"
#include "model/dispatcher.h"
#include "model/layout_rules.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/add/add.h"
#include "ops/elementwise/row_gate/row_gate.h"
#include "ops/exchange/clone_experts/clone_experts.h"
#include "ops/exchange/coded_rows/coded_rows.h"
#include "ops/exchange/prefix_sum/prefix_sum.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/expert_rows/expert_rows.h"
#include "ops/experts/grouped_bias/grouped_bias.h"
#include "ops/experts/grouped_linear/grouped_linear.h"
#include "ops/experts/permute/permute.h"
#include "ops/losses/load_balancing_loss/load_balancing_loss.h"
#include "ops/losses/router_entropy/router_entropy.h"
#include "ops/losses/router_z_loss/router_z_loss.h"
#include "ops/products/linear/linear.h"
#include "ops/routing/clone_placement/clone_placement.h"
#include "ops/routing/count_experts/count_experts.h"
#include "ops/routing/expert_capacity/expert_capacity.h"
#include "ops/routing/jitter/jitter.h"
#include "ops/routing/random_logits/random_logits.h"
#include "ops/routing/route/route.h"
#include "ops/routing/router_topk/router_topk.h"
#include "ops/routing/sinkhorn/sinkhorn.h"

namespace troupe {
namespace {

// The forward pass of one layer's block for one micro-batch.
class MoeForward {
 public:
  MoeForward(const BlockContext& context, const ModelConfig& config, const MlpSpec& expert,
             const Moe::Parameters& parameters, int32_t layer, ValueId input)
      : context_(context),
        builder_(context.builder),
        config_(config),
        expert_(expert),
        parameters_(parameters),
        layer_(layer),
        batch_(context.batch),
        input_(input),
        options_(context.options),
        result_(context.result) {}

  ValueId build() {
    const ValueId logits = build_logits();
    const RouterTopkResult chosen = choose(logits);
    const ValueId wanted = drop_over_capacity(chosen);
    const SpreadRows spread_rows = spread(wanted);
    const LimitedRows limited = limit_rows(spread_rows);
    const int64_t step = tokens_of_round();
    const bool in_parts = step < tokens();
    // The fallback keeps nothing of the experts, also where all tokens go in one round.
    const bool in_rounds = in_parts || (options_.expert_rounds && options_.training && rows_vary());
    const MessageRounding& messages = options_.messages;
    const ValueId dispatched =
        messages.dispatched ? round_rows(builder_, input_, "dispatched") : input_;
    ValueId routed;
    for (int64_t first = 0; first < tokens(); first += step) {
      ValueId kept = limited.kept;
      if (in_rounds) builder_.place.round = static_cast<int16_t>(first / step + 1);
      if (in_parts) {
        kept = keep_tokens(builder_, kept, {.first = first, .count = step}, "kept_of_round");
      }
      const std::unique_ptr<Dispatcher> dispatcher =
          make_dispatcher(builder_, config_, part(), options_.dispatcher,
                          {.experts = experts_here() * part().layout().ep(),
                           .tokens = step,
                           .most_rows = rows_with_room()});
      const DispatchedTokens tokens = dispatcher->dispatch(dispatched, chosen.probabilities, kept);
      const Routing routing = plan_rows(tokens);
      if (first == 0) report(chosen, wanted, spread_rows, limited, logits, routing);
      const ValueId sum = dispatcher->collect(build_experts(tokens, routing));
      builder_.place.round = 0;
      routed = first == 0 ? sum : add(builder_, routed, sum, "moe_sum_so_far");
    }
    if (messages.combine_gradients && options_.training) {
      routed = round_gradient(builder_, routed, "moe_routed");
    }
    if (!config_.has_shared_expert()) return routed;
    builder_.place.module = &kSharedExpertModule;
    const ValueId shared = build_shared_expert();
    builder_.place.module = &kMoeModule;
    return add(builder_, routed, shared, "moe_and_shared_out");
  }

 private:
  ValueId parameter(ParameterId id) const { return context_.parameter(id); }
  const ModelPart& part() const { return context_.part(); }
  uint32_t substream(RandomPlace place) const {
    return random_substream(place, layer_, options_.micro_batch);
  }
  // Of this rank.
  int64_t tokens() const { return builder_.value(input_).shape[0]; }

  ValueId build_logits() {
    ValueId input = input_;
    if (options_.training && config_.moe_input_jitter_eps > 0) {
      input = jitter(builder_, input, options_.step,
                     {.seed = options_.seed,
                      .substream = substream(RandomPlace::router_jitter),
                      .epsilon = config_.moe_input_jitter_eps,
                      .origin = row_origin(part(), batch_.sequence, tokens())},
                     "router_in");
    }
    const ValueId logits =
        linear(builder_, input, parameter(parameters_.w_router),
               {.bias = parameter(parameters_.b_router),
                .output = config_.moe_router_fp64 ? LinearOutput::f64 : LinearOutput::accumulation},
               "router_logits");
    const double bias = config_.moe_router_force_biased;
    const bool forced = config_.moe_router_force_load_balancing || bias != 0;
    if (!options_.training || !forced) return logits;
    return random_logits(builder_, logits, options_.step,
                         {.seed = options_.seed,
                          .substream = substream(RandomPlace::router_logits),
                          .origin = row_origin(part(), batch_.sequence, tokens()),
                          .bias = bias,
                          .bias_substream = static_cast<uint32_t>(config_.owner_of(layer_))},
                         "random_logits");
  }

  RouterTopkResult choose(ValueId logits) {
    RouterTopkAttributes attributes{
        .top_k = config_.moe_router_topk,
        .score_function = config_.moe_router_score_function,
        .pre_softmax = config_.moe_router_pre_softmax,
        .scaling_factor = config_.moe_router_topk_scaling_factor,
        .num_groups = config_.moe_router_num_groups,
        .group_topk = config_.moe_router_group_topk,
        .group_scores = config_.moe_router_group_scores,
        .normalize = config_.moe_router_normalize_scores,
        .probability_dtype = accumulation_dtype(builder_.value(input_).dtype)};
    RouterTopkInputs inputs{.logits = logits, .expert_bias = {}, .selected = {}};
    if (config_.moe_router_sinkhorn) {
      // Weights: sigmoid when one expert is chosen, otherwise softmax over all experts.
      attributes.pre_softmax = true;
      attributes.scaling_factor = 1;  // as in Megatron, which does not scale them
      if (config_.moe_router_topk == 1) attributes.score_function = ScoreFunction::sigmoid;
      if (options_.training) {
        inputs.selected =
            sinkhorn_topk(builder_, logits, {.top_k = config_.moe_router_topk}, "sinkhorn");
      }
    }
    const auto owner = static_cast<size_t>(config_.owner_of(layer_));
    if (const StateId expert_bias = context_.state.expert_biases[owner]; expert_bias.valid()) {
      inputs.expert_bias = builder_.state(expert_bias);
    }
    if (!options_.selected.empty()) {
      inputs.selected = options_.selected[static_cast<size_t>(layer_)];
      inputs.expert_bias = {};
    }
    return router_topk(builder_, inputs, attributes, "router_weights");
  }

  // Rows that each expert takes from this rank's tokens when capacity is limited; otherwise 0.
  int64_t capacity() const {
    if (config_.moe_expert_capacity_factor == 0) return 0;
    return expert_capacity(tokens(), config_.moe_router_topk, config_.num_experts,
                           config_.moe_expert_capacity_factor);
  }
  // Rows of each expert when they are padded: those of all ranks that send it tokens.
  int64_t padded_capacity() const {
    if (!config_.moe_pad_expert_input_to_capacity) return 0;
    return capacity() * dispatch_ranks(part());
  }

  ValueId drop_over_capacity(const RouterTopkResult& chosen) {
    const int64_t rows = capacity();
    // An expert is chosen at most once by each token.
    if (rows == 0 || rows >= tokens()) return chosen.indices;
    ExpertCapacityAttributes attributes{
        .experts = config_.num_experts, .capacity = rows, .policy = config_.moe_token_drop_policy};
    if (attributes.policy == DropPolicy::position && batch_.batch > 1) {
      attributes.sequence_tokens = batch_.sequence;
      attributes.first_token = row_origin(part(), batch_.sequence, tokens()).first_row;
    }
    return limit_to_capacity(builder_, chosen.probabilities, chosen.indices, attributes, "kept");
  }

  // What is routed to the experts of one rank by all ranks that share the experts.
  int64_t tokens_of_group() const { return tokens() * dispatch_ranks(part()); }
  // Where tokens go in rounds, which need little room, all of them go to the experts' own ranks.
  int32_t clones() const {
    return options_.training && !options_.expert_rounds ? part().expert_clones() : 0;
  }
  // Its own and its copies of others'.
  int64_t experts_here() const { return config_.num_experts / part().layout().ep() + clones(); }
  // An expert is chosen at most once by each token.
  int64_t rows_of_a_token() const {
    return std::min<int64_t>(config_.moe_router_topk, experts_here());
  }
  double even_rows() const {
    return static_cast<double>(tokens_of_group() * config_.moe_router_topk) / part().layout().ep();
  }
  // The rows of this rank's experts: at most, and as many as there is room for.
  int64_t most_rows() const {
    const int64_t rows = tokens_of_group() * rows_of_a_token();
    if (capacity() == 0) return rows;
    return std::min(rows, experts_here() * capacity() * dispatch_ranks(part()));
  }
  int64_t rows_with_room() const {
    const double factor = part().run->expert_room;
    if (factor == 0 || dispatch_ranks(part()) == 1) return most_rows();
    // At least those of one token of each rank.
    const int64_t least = dispatch_ranks(part()) * rows_of_a_token();
    const auto rows = static_cast<int64_t>(std::ceil(factor * even_rows()));
    return std::min(most_rows(), std::max(rows, least));
  }
  // Whether it depends on the routing how many rows this rank's experts get.
  bool rows_vary() const { return padded_capacity() == 0 && dispatch_ranks(part()) > 1; }
  bool may_lack_room() const { return rows_vary() && rows_with_room() < most_rows(); }

  // How many tokens of each rank go at a time.
  int64_t tokens_of_round() const {
    if (!options_.expert_rounds || !may_lack_room()) return tokens();
    return std::min(tokens(), rows_with_room() / (dispatch_ranks(part()) * rows_of_a_token()));
  }

  // Rows by the number of their expert, or of the slot that serves them where experts have copies.
  struct SpreadRows {
    ValueId chosen;
    ValueId loads;  // of all ranks; invalid: not counted yet
  };

  ValueId count_own_rows(ValueId wanted) {
    return count_experts(builder_, wanted, {}, {.experts = config_.num_experts},
                         "expert_rows_here");
  }

  // Over the experts' own ranks and those with copies.
  SpreadRows spread(ValueId wanted) {
    if (clones() == 0) return {.chosen = wanted, .loads = {}};
    const PrefixSumResult rows = prefix_sum(builder_, count_own_rows(wanted), {},
                                            {.group = RankGroup::etp_ep}, "expert_rows");
    clones_ = place_clones(builder_, rows.total,
                           {.parts = part().layout().ep(), .clones = clones()}, "clones");
    return {.chosen = spread_over_clones(builder_, wanted, rows.running, clones_, "chosen_slots"),
            .loads = clones_.slot_loads};
  }

  // Where room may lack and tokens go all at once: whether it does.
  LimitedRows limit_rows(const SpreadRows& wanted) {
    if (options_.expert_rounds || !may_lack_room()) {
      return {.kept = wanted.chosen, .over = {}, .fullest = {}};
    }
    ValueId loads = wanted.loads;
    if (!loads.valid()) {
      loads = sum_over_ranks(builder_, count_own_rows(wanted.chosen), {.group = RankGroup::etp_ep},
                             "expert_rows");
    }
    return limit_expert_rows(builder_, wanted.chosen, loads,
                             {.parts = part().layout().ep(), .rows = rows_with_room()},
                             "kept_with_room");
  }

  Routing plan_rows(const DispatchedTokens& tokens) {
    RouteAttributes attributes{
        .experts = static_cast<int32_t>(experts_here()),
        .row_multiple = config_.moe_expert_row_multiple,
        .padded_capacity = static_cast<int32_t>(padded_capacity()),
        .expected_slots = static_cast<int64_t>(even_rows()) * tokens_of_round() / this->tokens()};
    const int64_t slots = builder_.value(tokens.experts).shape.elements();
    if (padded_capacity() == 0 && rows_with_room() < slots) {
      attributes.most_slots = rows_with_room();
    }
    return route(builder_, tokens.experts, attributes, "routing");
  }

  void report(const RouterTopkResult& chosen, ValueId wanted, const SpreadRows& spread_rows,
              const LimitedRows& limited, ValueId logits, const Routing& routing) {
    const int16_t round = std::exchange(builder_.place.round, int16_t{0});
    result_.routers.push_back(
        {.layer = layer_,
         .selected = chosen.indices,
         .counts = count_rows(wanted, routing),
         .slots = count_slots(spread_rows.chosen),
         .entropy = router_entropy(builder_, logits, "router_entropy", batch_.valid),
         .valid = batch_.valid.count,
         .over = limited.over,
         .fullest = limited.fullest,
         .even = even_rows()});
    if (options_.training) add_losses(logits);
    builder_.place.round = round;
  }

  // How many rows each of the model's experts got from this rank's tokens, those of padding left
  // out where there is a mask.
  ValueId count_rows(ValueId kept, const Routing& routing) {
    const ValueId valid = batch_.valid.mask;
    if (dispatch_ranks(part()) == 1 && !valid.valid()) return routing.counts;
    return count_experts(builder_, kept, {}, {.experts = config_.num_experts}, "expert_counts",
                         valid);
  }

  ValueId count_slots(ValueId chosen) {
    if (clones() == 0) return {};
    return count_experts(builder_, chosen, {},
                         {.experts = part().expert_slots(config_.num_experts)}, "slot_counts",
                         batch_.valid.mask);
  }

  // The top k of the scores alone, which the load-balancing losses count: without expert bias,
  // groups, dropping, or replay. Scores of every kind rise with the logits.
  ValueId clean_selection(ValueId logits) {
    const bool clean = config_.moe_router_num_groups == 0 &&
                       !config_.moe_router_enable_expert_bias && options_.selected.empty();
    if (clean) return result_.routers.back().selected;
    return router_topk(builder_, {.logits = logits, .expert_bias = {}, .selected = {}},
                       {.top_k = config_.moe_router_topk,
                        .pre_softmax = true,
                        .probability_dtype = builder_.value(logits).dtype},
                       "clean_router_weights")
        .indices;
  }

  // How often the tokens of the micro-batch, those of all ranks of tp and cp, chose each expert,
  // for each of `attributes.sequences` sequences.
  ValueId count(ValueId selection, const CountExpertsAttributes& attributes,
                const std::string& name) {
    const Layout& layout = part().layout();
    const bool alone = layout.tp() * layout.cp() == 1;
    const ValueId own = count_experts(builder_, selection, {}, attributes,
                                      alone ? name : name + "_here", batch_.valid.mask);
    return alone ? own : sum_over_ranks(builder_, own, {.group = RankGroup::tp_cp}, name);
  }

  // How often the micro-batches of the step up to this one, of all ranks, chose each expert.
  ValueId count_so_far(ValueId selection, const CountExpertsAttributes& attributes,
                       const std::string& name) {
    const Layout& layout = part().layout();
    ValueId& total = (*options_.running_counts)[static_cast<size_t>(layer_)];
    if (layout.dp() == 1) {
      total = count_experts(builder_, selection, total, attributes, name, batch_.valid.mask);
      if (layout.tp() * layout.cp() == 1) return total;
      return sum_over_ranks(builder_, total, {.group = RankGroup::tp_cp}, name + "_of_all");
    }
    const ValueId own = count(selection, attributes, name + "_own");
    const PrefixSumResult sums = prefix_sum(builder_, own, total, {.group = RankGroup::dp}, name);
    total = sums.total;
    return sums.running;
  }

  void add_losses(ValueId logits) {
    const auto used = [&](AuxiliaryLossKind kind) {
      return coefficient_of(kind, config_, layer_) > 0;
    };
    ValueId selection;
    if (used(AuxiliaryLossKind::load_balancing) || used(AuxiliaryLossKind::seq_load_balancing) ||
        used(AuxiliaryLossKind::global_load_balancing)) {
      selection = clean_selection(logits);
    }
    const ModelPart& part = context_.part();
    const int32_t sharing = part.sequence_parallel() ? part.layout().tp() : 1;
    const int32_t cp = part.layout().cp();
    const bool masked = batch_.valid.mask.valid();
    for (const AuxiliaryLossKind kind : kAuxiliaryLossKinds) {
      if (!used(kind) || kind == AuxiliaryLossKind::indexer) continue;
      const std::string name(name_of(kind));
      const double coefficient = coefficient_of(kind, config_, layer_);
      ValueId loss;
      if (kind == AuxiliaryLossKind::z) {
        // Of the mean over all tokens, this rank's part; with a mask the mean is made of parts.
        const int32_t parts = masked ? 1 : sharing * cp;
        loss = router_z_loss(builder_, logits, {.coefficient = coefficient / parts}, name,
                             batch_.valid);
      } else {
        LoadBalancingLossAttributes attributes{.coefficient = coefficient / (masked ? 1 : cp * cp),
                                               .top_k = config_.moe_router_topk,
                                               .score_function = config_.moe_router_score_function};
        CountExpertsAttributes counting{.experts = config_.num_experts};
        if (kind == AuxiliaryLossKind::seq_load_balancing) {
          attributes.sequences = counting.sequences = batch_.batch;
        }
        if (sharing > 1) {
          const auto here = static_cast<int32_t>(tokens());
          attributes.first_token = counting.first_token = part.dense().tp * here;
          attributes.sequence_tokens = counting.sequence_tokens =
              sharing * here / attributes.sequences;
        }
        ValueId counts;
        if (kind == AuxiliaryLossKind::global_load_balancing) {
          attributes.steps = options_.micro_batch + 1;
          counts = count_so_far(selection, counting, name + "_counts");
        } else {
          counts = count(selection, counting, name + "_counts");
        }
        loss = load_balancing_loss(builder_, logits, counts, attributes, name, batch_.valid);
      }
      result_.auxiliary_losses.push_back({kind, layer_, loss});
    }
  }

  // Of this rank's experts, and of those of which it has copies: invalid where there are none.
  struct ExpertParameter {
    ValueId own;
    ValueId copies;
  };
  ExpertParameter expert_parameter(ParameterId id) {
    const ValueId own = parameter(id);
    if (clones() == 0) return {.own = own, .copies = {}};
    return {.own = own,
            .copies = clone_experts(builder_, own, clones_.experts, {.ranks = part().layout().ep()},
                                    builder_.value(own).name + "_copies")};
  }

  ValueId expert_linear(ValueId rows, ParameterId id, ValueId offsets, const char* name) {
    const ExpertParameter weight = expert_parameter(id);
    return grouped_linear(builder_, rows, weight.own, offsets, name, weight.copies);
  }
  ValueId add_expert_bias(ValueId rows, ParameterId id, ValueId offsets, GroupedBiasOptions options,
                          const char* name) {
    const ExpertParameter bias = expert_parameter(id);
    options.more = bias.copies;
    return grouped_bias(builder_, rows, bias.own, offsets, options, name);
  }

  // Returns the sums over this rank's experts, by row of `tokens`.
  ValueId build_experts(const DispatchedTokens& tokens, const Routing& routing) {
    const ValueId probabilities = tokens.probabilities;
    builder_.place.module = &kExpertRowsModule;
    const ValueId rows = permute(builder_, tokens.rows, routing, "expert_in");
    builder_.place.module = &kExpertFc1Module;
    ValueId gate_up = expert_linear(rows, parameters_.w_gate_up, routing.offsets, "gate_up");
    if (config_.add_bias_linear) {
      gate_up =
          add_expert_bias(gate_up, parameters_.b_gate_up, routing.offsets, {}, "gate_up_biased");
    }
    builder_.place.module = &kExpertActivationModule;
    const ValueId activated = activation(builder_, gate_up, probabilities, routing.row_slot,
                                         activation_in(options_, expert_), "activated");
    builder_.place.module = &kMoeModule;
    ValueId out = expert_linear(activated, parameters_.w_down, routing.offsets, "expert_out");
    if (config_.add_bias_linear) {
      // Inside the weighted sum: each row's bias carries the row's router weight.
      out = add_expert_bias(out, parameters_.b_down, routing.offsets,
                            {.probabilities = probabilities, .row_slot = routing.row_slot},
                            "expert_out_biased");
    }
    return combine(builder_, out, routing, "moe_out");
  }

  ValueId build_shared_expert() {
    const TensorParallel tensor_parallel(builder_, part());
    const ValueId rows = tensor_parallel.enter(input_, "shared_in_all");
    const ValueId gate_up =
        linear(builder_, rows, parameter(parameters_.w_shared_gate_up), {}, "shared_gate_up");
    const ValueId activated =
        activation(builder_, gate_up, {}, {}, activation_in(options_, expert_), "shared_activated");
    const ValueId out = leave_linear(builder_, tensor_parallel, activated,
                                     parameter(parameters_.w_shared_down), {}, "shared_out");
    if (!config_.moe_shared_expert_gate) return out;
    const ValueId gate = linear(builder_, input_, parameter(parameters_.w_shared_gate),
                                {.quantizable = false}, "shared_gate");
    return row_gate(builder_, out, gate, "shared_out_gated");
  }

  const BlockContext& context_;
  Builder& builder_;
  const ModelConfig& config_;
  const MlpSpec& expert_;
  const Moe::Parameters& parameters_;
  const int32_t layer_;
  const BatchValues& batch_;
  const ValueId input_;
  const ForwardOptions& options_;
  ForwardResult& result_;
  ClonePlacement clones_;  // where experts have copies
};

}  // namespace

Moe::Moe(ParameterList& parameters, const ModelConfig& config, int32_t layer)
    : LayerBlock(layer),
      config_(config),
      expert_(mlp_spec_of(config, config.moe_ffn_hidden_size)),
      shared_(mlp_spec_of(config, config.moe_shared_expert_intermediate_size)) {
  const int64_t experts = config.num_experts;
  const int64_t hidden = config.hidden_size;
  const bool is_biased = config.add_bias_linear;
  const ParameterList::Options everywhere{.gradient_class = GradientClass::replicated};
  const Cut by_expert = cut_anywhere(0, CutOver::ep, experts, "the number of experts");
  // Of which a token uses the part of the experts that it chooses.
  const auto of_experts = [&](const Shape& shape, std::vector<Cut> cuts) {
    return ParameterList::Options{
        .cuts = std::move(cuts),
        .gradient_class = GradientClass::expert,
        .active_elements = shape.elements() / experts * config.moe_router_topk};
  };
  const auto expert_weight = [&](const char* name, const Shape& shape, const Cut& inner) {
    ParameterList::Options options = of_experts(shape, {by_expert, inner});
    options.is_into_stream = inner.dimension == 2;
    options.products = ProductGroup::experts;
    return parameters.weight(name, shape, options);
  };
  const auto expert_bias = [&](const char* name, const Shape& shape) {
    return is_biased ? parameters.bias(name, shape, of_experts(shape, {by_expert})) : ParameterId{};
  };

  parameters_.w_router = parameters.weight("w_router", {experts, hidden}, everywhere);
  if (is_biased) parameters_.b_router = parameters.drawn_bias("b_router", {experts}, everywhere);
  parameters_.w_gate_up = expert_weight("w_gate_up", {experts, expert_.rows(), hidden},
                                        cut_first_product(1, CutOver::etp, expert_));
  parameters_.b_gate_up = expert_bias("b_gate_up", {experts, expert_.rows()});
  parameters_.w_down =
      expert_weight("w_down", {experts, hidden, expert_.width},
                    cut_anywhere(2, CutOver::etp, expert_.width, "the experts' inner size"));
  parameters_.b_down = expert_bias("b_down", {experts, hidden});
  if (config.has_shared_expert()) {
    parameters_.w_shared_gate_up =
        parameters.weight("w_shared_gate_up", {shared_.rows(), hidden},
                          {.cuts = {cut_first_product(0, CutOver::tp, shared_)},
                           .products = ProductGroup::shared_experts});
    parameters_.w_shared_down = parameters.weight(
        "w_shared_down", {hidden, shared_.width},
        {.cuts = {cut_anywhere(1, CutOver::tp, shared_.width, "the shared expert's inner size")},
         .is_into_stream = true,
         .products = ProductGroup::shared_experts});
    if (config.moe_shared_expert_gate) {
      parameters_.w_shared_gate = parameters.weight("w_shared_gate", {1, hidden}, everywhere);
    }
  }
  if (config.moe_router_enable_expert_bias) parameters.router_state("expert_bias", {experts});
}

ValueId Moe::build(const BlockContext& context, ValueId input) const {
  context.builder.place.module = &kMoeModule;
  return MoeForward(context, config_, expert_, parameters_, layer(), input).build();
}

double Moe::forward_flops(int64_t) const {
  return expert_.flops() * config_.moe_router_topk + shared_.flops();
}

std::optional<Refusal> Moe::check_layout(const Layout& layout, ContextExchange) const {
  if (config_.has_shared_expert()) {
    if (auto refusal = require_divisor(Setting::tensor_parallel, layout.tp(), shared_.width,
                                       "the shared expert's inner size")) {
      return refusal;
    }
  }
  if (auto refusal = require_divisor(Setting::expert_parallel, layout.ep(), config_.num_experts,
                                     "the number of experts")) {
    return refusal;
  }
  constexpr Setting kSlices = Setting::expert_tensor_parallel;
  if (auto refusal =
          require_divisor(kSlices, layout.etp(), expert_.width, "the experts' inner size")) {
    return refusal;
  }
  if (layout.etp() == 1 || !config_.add_bias_linear) return std::nullopt;
  return Refusal{
      .setting = kSlices,
      .message = {kSlices,
                  fmt::format(" {}: experts with biases cannot be sliced. Use ", layout.etp()),
                  kSlices, " 1, or ", Setting::no_linear_bias, "."},
      .nearest = {1}};
}

}  // namespace troupe
