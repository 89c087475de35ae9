#include "support/random_layouts.h"

#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "model/blocks/dense_mlp.h"
#include "model/blocks/gqa_attention.h"
#include "model/blocks/mla_attention.h"
#include "model/blocks/moe.h"
#include "model/blocks/norm.h"
#include "model/parameter_layout.h"
#include "program/test_models.h"
#include "support/layout_models.h"

namespace troupe::testing {
namespace {

constexpr uint64_t kDraw = 20;

// Four layers, so that there are pipelines; eight experts; eight query heads on four others.
std::vector<NamedModel> models() {
  ModelConfig dense = dense_model(4);
  dense.num_attention_heads = 8;
  dense.num_query_groups = 4;

  ModelConfig biased = dense;
  biased.tie_embeddings = false;
  biased.normalization = Normalization::layer_norm;
  biased.add_bias_linear = true;
  biased.add_qkv_bias = true;
  biased.vocab_size = 97;

  ModelConfig aux = moe_model(4);
  aux.num_attention_heads = 8;
  aux.num_query_groups = 4;
  aux.num_experts = 8;
  aux.moe_aux_loss_coeff = 0.5;
  aux.moe_z_loss_coeff = 0.1;

  ModelConfig shared = aux;
  shared.moe_aux_loss_coeff = 0;
  shared.moe_seq_aux_loss_coeff = 0.5;
  shared.moe_shared_expert_intermediate_size = 32;
  shared.moe_shared_expert_gate = true;
  shared.moe_layers[0] = false;
  shared.ffn_hidden_size = 40;
  shared.tie_embeddings = true;

  ModelConfig biases = aux;
  biases.moe_aux_loss_coeff = 0;
  biases.moe_global_aux_loss_coeff = 0.5;
  biases.moe_router_enable_expert_bias = true;
  biases.moe_router_score_function = ScoreFunction::sigmoid;
  biases.moe_router_bias_update_rate = 0.05;
  biases.moe_router_topk = 1;  // so that experts, and whole ranks, stay without tokens

  // As DeepSeek-V3 has it, with stretched positions; its groups go by their best expert.
  ModelConfig latent = shared;
  set_latent_attention(latent);
  latent.qk_layernorm = true;
  latent.rotary_interleaved = true;
  latent.rope_scaling_type = RopeScalingKind::yarn;
  latent.rope_scaling_factor = 4;
  latent.rope_original_positions = 16;
  latent.rope_scaling_fast = 8;
  latent.rope_scaling_slow = 1;
  latent.moe_router_score_function = ScoreFunction::sigmoid;
  latent.moe_router_num_groups = 4;
  latent.moe_router_group_topk = 2;
  latent.moe_router_group_scores = 1;
  ModelConfig sparse = latent;  // as DeepSeek-V3.2 has it
  sparse.dsa_indexer_topk = 6;
  sparse.dsa_indexer_n_heads = 3;
  sparse.dsa_indexer_head_dim = 8;
  sparse.dsa_indexer_loss_coeff = 0.3;
  sparse.moe_layers[0] = false;
  sparse.ffn_hidden_size = 40;
  ModelConfig chosen = sparse;  // the indexer learns from the chosen keys
  chosen.dsa_indexer_use_sparse_loss = true;
  ModelConfig query = latent;  // queries are made of the input
  query.q_lora_rank = 0;
  query.attention_dropout = 0.1;

  ModelConfig sinks = aux;
  sinks.attention_sinks = true;
  sinks.sliding_window = 5;
  sinks.window_layers = {true, false, true, false};
  sinks.add_qkv_bias = true;
  sinks.add_bias_linear = true;
  sinks.attention_dropout = 0.1;

  ModelConfig partial = aux;
  partial.rotary_percent = 0.5;
  partial.qk_layernorm = true;

  return {{"dense", dense}, {"biased", biased}, {"aux", aux},      {"shared", shared},
          {"bias", biases}, {"latent", latent}, {"query", query},  {"partial", partial},
          {"sinks", sinks}, {"sparse", sparse}, {"chosen", chosen}};
}

class Draw {
 public:
  explicit Draw(uint64_t number) : number_(number) {}
  template <class T, size_t N>
  T of(const std::array<T, N>& choices) {
    return choices[below(N)];
  }
  size_t below(size_t count) {
    return static_cast<size_t>(
        random_below(count, kDraw, RandomStream::test, static_cast<uint32_t>(number_), next_++));
  }

 private:
  uint64_t number_;
  uint64_t next_ = 0;
};

std::string text_of(const LayoutCase& c, const std::string& model) {
  const LayoutOptions& o = c.layout;
  std::string text = model + "_ranks" + std::to_string(o.world_size);
  const auto add = [&](const char* name, int32_t size) {
    if (size > 1) text += std::string("_") + name + std::to_string(size);
  };
  add("tp", o.tensor_parallel);
  if (o.sequence_parallel && o.tensor_parallel > 1) text += "_sp";
  add("cp", o.context_parallel);
  if (o.context_parallel > 1) {
    constexpr std::array kNames = {"p2p", "a2a", "allgather"};
    text += std::string("_") + kNames[static_cast<size_t>(c.context_exchange)];
  }
  add("pp", o.pipeline_parallel);
  add("chunks", c.chunks);
  if (c.schedule == PipelineSchedule::zb_h1) text += "_zbh1";
  if (c.schedule == PipelineSchedule::zb_v) text += "_zbv";
  if (!c.stages.empty()) text += "_uneven";
  add("ep", o.expert_parallel);
  add("etp", o.expert_tensor_parallel.value_or(1));
  if (o.expert_parallel * o.expert_tensor_parallel.value_or(1) > 1) {
    text += "_by_" + std::string(name_of(c.dispatcher));
  }
  if (o.order != kDefaultRankOrder) text += "_other_order";
  add("mbs", c.micro_batch_size);
  add("acc", c.micro_batches);
  if (c.sharding == StateSharding::optimizer) text += "_zero1";
  if (c.sharding == StateSharding::parameters) text += "_fsdp";
  add("instances", o.optimizer_instances);
  if (c.per_token_loss) text += "_per_token";
  if (c.early_collectives) text += "_early";
  if (c.gradient_bucket_elements > 0) text += "_buckets";
  if (c.merged) text += "_merged";
  if (c.overlap.delay_weight_gradients) text += "_delayed";
  if (c.overlap.shared_expert) text += "_shared_overlap";
  if (c.recompute.granularity == RecomputeOptions::Granularity::full) text += "_recompute";
  if (c.recompute.granularity == RecomputeOptions::Granularity::selective) text += "_selective";
  if (c.loss_chunk_tokens > 0) text += "_loss_chunks";
  if (c.reset_attention_mask) text += "_documents";
  if (c.model.mtp_num_layers > 0) text += "_mtp" + std::to_string(c.model.mtp_num_layers);
  if (c.model.mtp_use_repeated_layer) text += "_repeated";
  if (c.stages.find('m') < c.stages.rfind('|')) text += "_spread";
  return text;
}

// What is computed when, and how often: whether forwards and backwards are merged, weight gradients
// delayed, the shared expert spread, layers or modules recomputed.
void draw_order(Draw& draw, LayoutCase& c) {
  const bool merged = draw.of(std::array{false, false, true});
  c.merged = merged && c.schedule == PipelineSchedule::one_f_one_b;
  c.overlap.delay_weight_gradients = draw.of(std::array{false, false, true});
  c.overlap.shared_expert = draw.of(std::array{false, false, true});
  RecomputeOptions& recompute = c.recompute;
  recompute.granularity = draw.of(
      std::array{RecomputeOptions::Granularity::none, RecomputeOptions::Granularity::none,
                 RecomputeOptions::Granularity::selective, RecomputeOptions::Granularity::full});
  recompute.method =
      draw.of(std::array{RecomputeOptions::Method::uniform, RecomputeOptions::Method::block});
  recompute.layers = draw.of(std::array{1, 2});
  for (const ModuleSpec* module :
       {&kCoreAttentionModule, &kMlaUpProjectionModule, &kExpertActivationModule, &kNormModule,
        &kMlpModule, &kMoeModule, &kSharedExpertModule}) {
    if (draw.of(std::array{false, true})) recompute.modules.insert(module);
  }
  c.loss_chunk_tokens = draw.of(std::array{0, 0, 3, 8});
  const bool moved = c.merged || c.schedule == PipelineSchedule::zb_v;
  if (c.model.tie_embeddings && moved) c.loss_chunk_tokens = 0;
}

// Layers of multi-token prediction, in the stage of the loss.
void draw_mtp(Draw& draw, LayoutCase& c) {
  c.model.mtp_num_layers = draw.of(std::array{0, 0, 1, 2});
  if (c.model.mtp_num_layers == 0) return;
  c.model.mtp_use_repeated_layer = draw.of(std::array{false, true});
  const bool moved = c.merged || c.schedule != PipelineSchedule::one_f_one_b;
  if (c.model.tie_embeddings && moved) c.loss_chunk_tokens = 0;
  if (!c.stages.empty()) {
    c.stages.insert(c.stages.size() - 1, static_cast<size_t>(c.model.mtp_num_layers), 'm');
  }
}

// Half of the pipelines with such layers have the first of them before the stage of the loss, and
// stages that end anywhere. One layer of all depths stays on one rank.
void draw_spread(Draw& draw, LayoutCase& c) {
  const int32_t ranks = c.layout.pipeline_parallel;
  const auto depths = static_cast<size_t>(c.model.mtp_num_layers);
  if (depths == 0 || ranks == 1 || draw.of(std::array{false, true})) return;
  const std::string layers(static_cast<size_t>(c.model.num_layers), 't');
  std::string stages = "E" + layers + std::string(depths, 'm');
  stages.insert(1 + layers.size() + 1 + draw.below(depths), 1, '|');
  for (int32_t more = ranks * c.chunks - 2; more > 0; --more) {
    stages.insert(1 + draw.below(stages.size()), 1, '|');
  }
  stages += 'L';
  const StagePlacement placement =
      c.schedule == PipelineSchedule::zb_v ? StagePlacement::v : StagePlacement::loop;
  const PipelinePartition partition =
      parse_partition(stages, c.model.num_layers, c.model.mtp_num_layers, ranks, placement).value();
  if (c.model.mtp_use_repeated_layer && partition.mtp_ranks().size() > 1) return;
  c.stages = stages;
}

// Some of those whose experts are on four ranks or more reach them in two steps.
void draw_nodes(Draw& draw, LayoutCase& c) {
  const int32_t ranks = c.layout.expert_parallel * c.layout.expert_tensor_parallel.value_or(1);
  if (ranks < 4 || draw.of(std::array{false, false, true})) return;
  LayoutOptions in_two_steps = c.layout;
  in_two_steps.dispatch_node_ranks = draw.of(std::array{2, 4});
  if (try_layout(in_two_steps).refusal() != nullptr) return;
  c.layout = in_two_steps;
  c.dispatcher = TokenDispatcher::hierarchical;
}

// Nothing when what was drawn is not valid.
std::optional<LayoutCase> draw_layout(uint64_t number) {
  Draw draw(number);
  static const std::vector<NamedModel> all = models();
  const NamedModel& model =
      all[static_cast<size_t>(draw.of(std::array{0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9, 10}))];
  LayoutCase c;
  c.model = model.config;
  LayoutOptions& o = c.layout;
  o.world_size = draw.of(std::array{2, 4, 4, 8, 8, 8, 16});
  o.tensor_parallel = draw.of(std::array{1, 1, 2, 2, 4});
  o.context_parallel = draw.of(std::array{1, 1, 1, 2, 4});
  o.pipeline_parallel = draw.of(std::array{1, 1, 2, 2, 4});
  const bool has_experts = c.model.num_experts > 0;
  o.expert_parallel = has_experts ? draw.of(std::array{1, 2, 2, 4, 8}) : 1;
  o.expert_tensor_parallel = has_experts ? draw.of(std::array{1, 1, 2}) : o.tensor_parallel;
  o.sequence_parallel = has_experts || draw.of(std::array{false, true});
  if (draw.of(std::array{false, false, true})) o.order = "cp-tp-ep-dp-pp";
  c.dispatcher = draw.of(
      std::array{TokenDispatcher::allgather, TokenDispatcher::alltoall, TokenDispatcher::flex});
  c.context_exchange =
      draw.of(std::array{ContextExchange::p2p, ContextExchange::a2a, ContextExchange::allgather});
  c.schedule = draw.of(std::array{PipelineSchedule::one_f_one_b, PipelineSchedule::one_f_one_b,
                                  PipelineSchedule::zb_h1, PipelineSchedule::zb_v});
  if (o.pipeline_parallel == 1) c.schedule = PipelineSchedule::one_f_one_b;
  c.chunks = c.schedule == PipelineSchedule::zb_v ? 2 : 1;
  const bool may_interleave =
      c.schedule == PipelineSchedule::one_f_one_b && o.pipeline_parallel > 1;
  if (may_interleave) c.chunks = draw.of(std::array{1, 1, 2});
  if (o.pipeline_parallel == 2 && c.chunks == 1 && draw.of(std::array{false, true})) {
    c.stages = draw.of(std::array{"Ettt|tL", "E|ttttL", "Et|tttL"});
  }
  c.micro_batch_size = draw.of(std::array{1, 1, 2});
  c.micro_batches = draw.of(std::array{1, 2, 4});
  c.sequence = 16;
  c.sharding =
      draw.of(std::array{StateSharding::none, StateSharding::optimizer, StateSharding::parameters});
  c.early_collectives = draw.of(std::array{false, true});
  c.gradient_bucket_elements = draw.of(std::array{0, 0, 5000});
  c.per_token_loss = draw.of(std::array{false, false, true});
  if (c.sharding != StateSharding::none) o.optimizer_instances = draw.of(std::array{1, 1, 2});
  draw_order(draw, c);
  c.reset_attention_mask = draw.of(std::array{false, false, true});
  draw_mtp(draw, c);
  draw_nodes(draw, c);
  draw_spread(draw, c);
  o.key_value_heads = c.model.num_query_groups;
  OrRefusal<Layout> layout = try_layout(o);
  if (layout.refusal() != nullptr) return std::nullopt;
  if (check_layout(c.model, layout.value(), c.sequence, c.context_exchange)) return std::nullopt;
  const PipelineShape shape{.schedule = c.schedule,
                            .ranks = o.pipeline_parallel,
                            .chunks = c.chunks,
                            .micro_batches = c.micro_batches,
                            .merged = c.merged};
  if (check_shape(shape)) return std::nullopt;
  if (c.stages.empty() &&
      even_partition(c.model.num_layers, o.pipeline_parallel, c.chunks, shape.placement())
              .refusal() != nullptr) {
    return std::nullopt;
  }
  c.name = text_of(c, model.name);
  return c;
}

}  // namespace

std::vector<LayoutCase> random_layouts(int count) {
  std::vector<LayoutCase> all;
  std::map<std::string, int> seen;
  for (uint64_t number = 0; all.size() < static_cast<size_t>(count); ++number) {
    std::optional<LayoutCase> c = draw_layout(number);
    if (!c || ++seen[c->name] > 1) continue;
    all.push_back(std::move(*c));
  }
  return all;
}

}  // namespace troupe::testing
