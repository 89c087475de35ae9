#include "model/blocks/gated_delta_net.h"

#include <array>
#include <cmath>

#include "model/blocks/gqa_attention.h"
#include "model/blocks/norm.h"
#include "model/layout_rules.h"
#include "model/model_state.h"
#include "model/tensor_parallel.h"
#include "ops/attention/causal_conv/causal_conv.h"
#include "ops/attention/delta_gates/delta_gates.h"
#include "ops/attention/fold_delta_states/fold_delta_states.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "ops/attention/gated_delta_rule/gated_delta_state.h"
#include "ops/attention/halo_rows/halo_rows.h"
#include "ops/elementwise/column_groups/column_groups.h"
#include "ops/exchange/all_gather/all_gather.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "ops/exchange/slices/slices.h"
#include "ops/norms/gated_norm/gated_norm.h"
#include "ops/products/linear/linear.h"

namespace troupe {

namespace {

// What the ranks of cp share between the convolution and the rule where each has whole sequences:
// the key heads that tp leaves them, with their values. Otherwise a rank has what it has.
class HeadShare {
 public:
  HeadShare(const BlockContext& context, const GatedDeltaNetSpec& spec, const SequenceChunks& rows)
      : context_(context),
        spec_(spec),
        chunks_(rows.ranks == 1 ? chunks_of(context.part()) : SequenceChunks()),
        all_heads_(spec.key_heads / context.part().layout().tp()) {}

  int32_t key_heads() const { return all_heads_ / chunks_.ranks; }

  ValueId of_qkv(ValueId rows) const {
    if (chunks_.ranks == 1) return rows;
    ExchangeHeadsAttributes exchange = exchange_of(spec_.key_dim);
    exchange.groups = all_heads_;
    exchange.value_dim = values();
    return sequence_to_heads(context_.builder, rows, exchange, "delta_qkv_by_heads");
  }
  ValueId of_gates(ValueId rows) const {
    if (chunks_.ranks == 1) return rows;
    return sequence_to_heads(context_.builder, rows, exchange_of(2 * spec_.values_of_key()),
                             "delta_gates_by_heads");
  }
  // Of a parameter whose sections have these sizes on the rank.
  ValueId of_parameter(ParameterId id, std::array<SliceSection, 4> sections) const {
    const ValueId all = context_.parameter(id);
    if (chunks_.ranks == 1) return all;
    for (SliceSection& section : sections) section.size *= chunks_.ranks;
    return take_slice(context_.builder, all,
                      {.sections = sections, .ranks = chunks_.ranks, .place = chunks_.rank},
                      context_.builder.value(all).name + "_of_heads");
  }
  // The rule's result, as rows of all heads.
  ValueId back(ValueId attended) const {
    if (chunks_.ranks == 1) return attended;
    return heads_to_sequence(context_.builder, attended, exchange_of(values()),
                             "context_by_sequence");
  }

 private:
  int32_t values() const { return spec_.values_of_key() * spec_.value_dim; }
  ExchangeHeadsAttributes exchange_of(int32_t head_dim) const {
    return {.chunks = chunks_,
            .batch = context_.batch.batch,
            .sequence = context_.batch.sequence * chunks_.ranks,
            .heads = all_heads_,
            .head_dim = head_dim};
  }

  const BlockContext& context_;
  const GatedDeltaNetSpec& spec_;
  const SequenceChunks chunks_;
  const int32_t all_heads_;  // key heads
};

// What the ranks of cp tell each other where each has chunks of every sequence: nothing where it
// has whole ones.
class ChunkBeginnings {
 public:
  ChunkBeginnings(const BlockContext& context, const SequenceChunks& rows)
      : context_(context), chunks_(rows) {}

  // Rows that follow each other.
  int32_t length() const {
    const int32_t rows = context_.batch.rows_of(chunks_);
    return chunks_.ranks == 1 ? rows : rows / 2;
  }
  // The rows before each chunk that the convolution reads.
  ValueId rows_before(ValueId qkv, int32_t taps) const {
    if (chunks_.ranks == 1 || taps == 1) return {};
    HaloRowsAttributes halo{
        .step = HaloStep::ends, .chunks = chunks_, .length = length(), .rows = taps - 1};
    const ValueId ends = halo_rows(context_.builder, qkv, halo, "delta_last_rows");
    halo.step = HaloStep::before;
    return halo_rows(context_.builder, of_all(ends), halo, "delta_rows_before");
  }
  ValueId state_before(ValueId convolved, ValueId gates,
                       const GatedDeltaRuleAttributes& rule) const {
    if (chunks_.ranks == 1) return {};
    const ValueId ends = gated_delta_state(context_.builder, convolved, gates,
                                           context_.batch.delta_starts, rule, "delta_ends");
    return fold_delta_states(context_.builder, of_all(ends), {chunks_}, "delta_states");
  }

 private:
  ValueId of_all(ValueId own) const {
    return all_gather(context_.builder, own, {.group = RankGroup::cp, .ranks = chunks_.ranks},
                      context_.builder.value(own).name + "_of_all");
  }

  const BlockContext& context_;
  const SequenceChunks chunks_;
};

}  // namespace

SequenceChunks rows_of_delta_nets(int32_t key_heads, const ModelPart& part) {
  const bool shares_heads = key_heads / part.layout().tp() % part.layout().cp() == 0;
  return shares_heads ? SequenceChunks() : chunks_of(part);
}

GatedDeltaNetSpec delta_net_spec_of(const ModelConfig& config) {
  return {.hidden = config.hidden_size,
          .key_heads = config.linear_num_key_heads,
          .value_heads = config.linear_num_value_heads,
          .key_dim = config.linear_key_head_dim,
          .value_dim = config.linear_value_head_dim,
          .taps = config.linear_conv_kernel_dim,
          .norm_epsilon = config.norm_epsilon};
}

GatedDeltaNet::GatedDeltaNet(ParameterList& parameters, const GatedDeltaNetSpec& spec,
                             int32_t layer)
    : LayerBlock(layer), spec_(spec) {
  const auto section = [&](int64_t size) {
    return CutSection{.size = size, .units = spec.key_heads};
  };
  const auto heads = [&](int dimension, int64_t size) {
    return Cut{
        .dimension = dimension, .sections = {section(size)}, .what = "the size of all heads"};
  };
  const int64_t in_rows = spec.conv_size() + spec.value_size();
  const int64_t value_heads = spec.value_heads;
  w_in_ = parameters.weight("w_delta_in", {in_rows, spec.hidden},
                            {.cuts = {heads(0, in_rows)}, .products = ProductGroup::attention});
  w_gates_ = parameters.weight("w_delta_gates", {2 * value_heads, spec.hidden},
                               {.cuts = {heads(0, 2 * value_heads)}});
  // Taps start as those of torch's convolutions: uniform, with the bound 1 / sqrt(taps).
  const Cut channels{
      .sections = {section(spec.key_size()), section(spec.key_size()), section(spec.value_size())}};
  conv_ = parameters.weight("delta_conv", {spec.conv_size(), spec.taps}, {.cuts = {channels}});
  ParameterSpec& conv = parameters.at(conv_);
  conv.is_matrix = false;
  conv.is_wide = true;
  conv.init_std = 0;
  conv.init_bound = 1 / std::sqrt(static_cast<double>(spec.taps));
  decay_ = parameters.shift("delta_decay", value_heads, {.cuts = {heads(0, value_heads)}});
  parameters.at(decay_).init_log_bound = 16;
  bias_ = parameters.shift("delta_bias", value_heads, {.cuts = {heads(0, value_heads)}});
  parameters.at(bias_).init_constant = 1;
  norm_ =
      parameters.shift("delta_norm", spec.value_dim, {.gradient_class = GradientClass::head_norm});
  parameters.at(norm_).init_constant = 1;
  w_out_ = parameters.weight("w_delta_out", {spec.hidden, spec.value_size()},
                             {.cuts = {heads(1, spec.value_size())},
                              .is_into_stream = true,
                              .products = ProductGroup::attention});
}

ValueId GatedDeltaNet::build(const BlockContext& context, ValueId input) const {
  Builder& builder = context.builder;
  const TensorParallel tensor_parallel(builder, context.part());
  // Of the norm that made them: where it is recomputed, the rows of all ranks are, too.
  builder.place.module = &kInputNormModule;
  const ValueId rows = tensor_parallel.enter(input, "attention_in_all");
  builder.place.module = &kQkvModule;
  const ValueId projected = linear(builder, rows, context.parameter(w_in_), {}, "delta_in");
  const ValueId gates =
      linear(builder, rows, context.parameter(w_gates_), {.quantizable = false}, "delta_gates_in");
  builder.place.module = &kCoreAttentionModule;
  const ValueId core = build_core(context, projected, gates);
  builder.place.module = &kAttentionOutModule;
  return leave_linear(builder, tensor_parallel, core, context.parameter(w_out_), {},
                      "attention_out");
}

ValueId GatedDeltaNet::build_core(const BlockContext& context, ValueId projected,
                                  ValueId gates) const {
  Builder& builder = context.builder;
  const int32_t values = spec_.values_of_key() * spec_.value_dim;
  const auto [qkv, z] =
      split_column_groups(builder, projected,
                          {.groups = spec_.key_heads / context.part().layout().tp(),
                           .widths = {spec_.key_dim, spec_.key_dim, values, values},
                           .first = 3},
                          "delta_qkv");
  return gated_norm(builder, build_rule(context, qkv, gates), z, context.parameter(norm_),
                    {.head_dim = spec_.value_dim, .epsilon = spec_.norm_epsilon}, "gated_context");
}

ValueId GatedDeltaNet::build_rule(const BlockContext& context, ValueId qkv, ValueId gates) const {
  Builder& builder = context.builder;
  const SequenceChunks rows = rows_of_delta_nets(spec_.key_heads, context.part());
  const HeadShare share(context, spec_, rows);
  const ChunkBeginnings beginnings(context, rows);
  const int32_t key_heads = share.key_heads();
  const int32_t value_heads = key_heads * spec_.values_of_key();
  const int32_t sequence = beginnings.length();
  const int64_t keys = int64_t{key_heads} * spec_.key_dim;
  const ValueId starts = context.batch.delta_starts;
  const ValueId taps =
      share.of_parameter(conv_, {{{keys}, {keys}, {int64_t{value_heads} * spec_.value_dim}}});
  const ValueId own = share.of_qkv(qkv);
  const ValueId before = beginnings.rows_before(own, spec_.taps);
  const ValueId convolved = causal_conv(builder, own, taps, {.starts = starts, .before = before},
                                        {.sequence = sequence}, "delta_convolved");
  const ValueId strengths =
      delta_gates(builder, share.of_gates(gates), share.of_parameter(decay_, {{{value_heads}}}),
                  share.of_parameter(bias_, {{{value_heads}}}),
                  {.heads = value_heads, .group_heads = spec_.values_of_key()}, "delta_gates");
  const GatedDeltaRuleAttributes rule{.sequence = sequence,
                                      .key_heads = key_heads,
                                      .value_heads = value_heads,
                                      .key_dim = spec_.key_dim,
                                      .value_dim = spec_.value_dim};
  const ValueId initial = beginnings.state_before(convolved, strengths, rule);
  const ValueId attended = gated_delta_rule(
      builder, convolved, strengths, {.starts = starts, .initial = initial}, rule, "context");
  return share.back(attended);
}

// Of the rule the three products with a state, for each value head.
double GatedDeltaNet::forward_flops(int64_t /*sequence*/) const {
  const auto rows = static_cast<double>(spec_.conv_size() + 2 * spec_.value_size() +
                                        2 * int64_t{spec_.value_heads});
  const double convolution = 2.0 * spec_.taps * static_cast<double>(spec_.conv_size());
  const double rule = 6.0 * spec_.key_dim * static_cast<double>(spec_.value_size());
  return 2.0 * spec_.hidden * rows + convolution + rule;
}

std::optional<Refusal> GatedDeltaNet::check_layout(const Layout& layout,
                                                   ContextExchange /*exchange*/) const {
  return require_divisor(Setting::tensor_parallel, layout.tp(), spec_.key_heads,
                         "the key heads of the model's gated delta nets");
}

}  // namespace troupe
