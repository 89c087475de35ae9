#include "options/layout_options.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "model/parameter_layout.h"
#include "options/cluster_options.h"
#include "options/model_options.h"
#include "options/offload_options.h"
#include "options/optimizer_options.h"
#include "options/precision_options.h"
#include "options/refusals.h"
#include "options/schedule_options.h"

namespace troupe {
namespace {

UnevenStages uneven_stages_of(const Options& options) {
  return {.first_layers = options.decoder_first_pipeline_num_layers.value_or(0),
          .last_layers = options.decoder_last_pipeline_num_layers.value_or(0),
          .count_embedding = options.account_for_embedding_in_pipeline_split,
          .count_loss = options.account_for_loss_in_pipeline_split};
}

// Stages per rank, unless a layout text says it. `layers`: with what counts as one.
int32_t chunks_of(const Options& options, int32_t layers) {
  const bool v = options.pipeline_schedule == PipelineSchedule::zb_v;
  if (options.num_virtual_stages_per_pipeline_rank) {
    return *options.num_virtual_stages_per_pipeline_rank;
  }
  if (!options.num_layers_per_virtual_pipeline_stage) return v ? 2 : 1;
  const int32_t each = *options.num_layers_per_virtual_pipeline_stage;
  const int32_t ranks = options.pipeline_model_parallel_size;
  const int64_t round = int64_t{each} * ranks;
  if (layers % round != 0) {
    const auto valid = [&](int64_t size) { return layers % (size * ranks) == 0; };
    const std::string nearest = text_of_values(nearest_values(each, layers, valid));
    throw_bad_request(fmt::format(
        "--num-layers-per-virtual-pipeline-stage {}: {} layers are not a multiple of {} x {} ranks "
        "of the pipeline. {}",
        each, layers, each, ranks,
        nearest.empty() ? "No size fits; choose another --pipeline-model-parallel-size."
                        : fmt::format("Nearest: {}.", nearest)));
  }
  return static_cast<int32_t>(layers / round);
}

// All but layers of multi-token prediction that no text places.
PipelinePartition stages_of(const Options& options, const ModelConfig& config) {
  const int32_t ranks = options.pipeline_model_parallel_size;
  const bool v = options.pipeline_schedule == PipelineSchedule::zb_v;
  const StagePlacement placement = v ? StagePlacement::v : StagePlacement::loop;
  const bool counted = options.num_virtual_stages_per_pipeline_rank.has_value();
  if (counted && options.num_layers_per_virtual_pipeline_stage) {
    throw_bad_request(
        "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage say "
        "the "
        "same in two ways; give one of them.");
  }
  const UnevenStages uneven = uneven_stages_of(options);
  if (options.pipeline_model_parallel_layout.empty()) {
    const auto chunks_among = [&](int32_t layers) {
      const int32_t chunks = chunks_of(options, layers);
      require_accepted(check_stages(options.pipeline_schedule, ranks, chunks));
      return chunks;
    };
    if (!uneven.any()) {
      return require_accepted(
          even_partition(config.num_layers, ranks, chunks_among(config.num_layers), placement));
    }
    const bool names_ranks = uneven.first_layers > 0 || uneven.last_layers > 0;
    if (names_ranks && options.num_layers_per_virtual_pipeline_stage) {
      throw_bad_request(
          "--num-layers-per-virtual-pipeline-stage: ranks of the pipeline have different numbers "
          "of "
          "layers (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers). Say "
          "--num-virtual-stages-per-pipeline-rank instead.");
    }
    const int32_t counted =
        config.num_layers + (uneven.count_embedding ? 1 : 0) + (uneven.count_loss ? 1 : 0);
    return require_accepted(
        uneven_partition(config.num_layers, ranks, chunks_among(counted), uneven, placement));
  }
  if (uneven.any()) {
    throw_bad_request(
        "--pipeline-model-parallel-layout says what each stage holds. Leave "
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and "
        "--account-for-...-in-pipeline-split out.");
  }
  if (counted || options.num_layers_per_virtual_pipeline_stage) {
    throw_bad_request(fmt::format(
        "--pipeline-model-parallel-layout says how many stages there are; leave --{} out.",
        counted ? "num-virtual-stages-per-pipeline-rank"
                : "num-layers-per-virtual-pipeline-stage"));
  }
  return require_accepted(parse_partition(options.pipeline_model_parallel_layout, config.num_layers,
                                          config.mtp_num_layers, ranks, placement));
}

PipelinePartition partition_of(const Options& options, const ModelConfig& config) {
  PipelinePartition partition = stages_of(options, config);
  if (options.pipeline_model_parallel_layout.empty()) {
    partition.stages.back().mtp_layers = config.mtp_num_layers;
  }
  const size_t mtp_ranks = partition.mtp_ranks().size();
  if (config.mtp_use_repeated_layer && mtp_ranks > 1) {
    throw_bad_request(fmt::format(
        "--pipeline-model-parallel-layout {}: its m are on {} ranks of the pipeline, and "
        "--mtp-use-repeated-layer makes them one layer, whose gradients are not summed over "
        "stages. Put all m on one rank, or leave --mtp-use-repeated-layer out.",
        options.pipeline_model_parallel_layout, mtp_ranks));
  }
  return partition;
}

// As TP unless given (Megatron's default), or 1 where the ranks do not suffice for that.
int32_t expert_tensor_parallel_of(const Options& options) {
  if (options.expert_tensor_parallel_size) return *options.expert_tensor_parallel_size;
  const int64_t replica =
      int64_t{options.tensor_model_parallel_size} * options.pipeline_model_parallel_size;
  // Two factors stay below 2^62; a third one is only applied to what divides the ranks.
  const bool suffices = options.ranks % replica == 0 &&
                        options.ranks / replica % options.expert_model_parallel_size == 0;
  return suffices ? options.tensor_model_parallel_size : 1;
}

DType main_gradient_dtype(const Options& options) {
  if (options.main_grads_dtype == DType::bf16 && !options.use_precision_aware_optimizer) {
    throw_bad_request(
        "--main-grads-dtype bf16: it belongs to --use-precision-aware-optimizer; add that, or use "
        "--grad-reduce-in-bf16.");
  }
  const bool narrow = options.main_grads_dtype == DType::bf16 || options.grad_reduce_in_bf16;
  if (narrow && options.compute_dtype == DType::f16) {
    throw_bad_request(
        "--fp16: its main gradients are fp32. Leave --main-grads-dtype and --grad-reduce-in-bf16 "
        "out.");
  }
  return narrow ? DType::bf16 : DType::f32;
}

StateSharding sharding_of(const Options& options) {
  const std::optional<StateSharding> strategy = options.data_parallel_sharding_strategy;
  if (options.use_megatron_fsdp) return strategy.value_or(StateSharding::parameters);
  if (strategy) {
    throw_bad_request(fmt::format(
        "--data-parallel-sharding-strategy {}: it belongs to --use-megatron-fsdp; add that.",
        value_text(options, "data-parallel-sharding-strategy")));
  }
  const bool is_sharded =
      options.use_distributed_optimizer || options.optimizer == OptimizerKind::dist_muon;
  return is_sharded ? StateSharding::optimizer : StateSharding::none;
}

// 0: tokens reach their experts in one step.
int32_t dispatch_node_ranks_of(const Options& options) {
  const bool in_two_steps = options.moe_token_dispatcher_type == TokenDispatcher::hierarchical;
  if (in_two_steps && !options.moe_dispatch_ranks_per_node) {
    throw_bad_request(
        "--moe-token-dispatcher-type hierarchical: say how many ranks a node has, with "
        "--moe-dispatch-ranks-per-node N.");
  }
  if (!in_two_steps && options.moe_dispatch_ranks_per_node) {
    throw_bad_request(fmt::format(
        "--moe-dispatch-ranks-per-node {}: it belongs to --moe-token-dispatcher-type hierarchical; "
        "add that.",
        *options.moe_dispatch_ranks_per_node));
  }
  return options.moe_dispatch_ranks_per_node.value_or(0);
}

// All but the places of the embedding, which follow from the stages.
LayoutOptions sizes_of(const Options& options, const ModelConfig& config) {
  LayoutOptions asked;
  asked.world_size = options.ranks;
  asked.tensor_parallel = options.tensor_model_parallel_size;
  asked.context_parallel = options.context_parallel_size;
  asked.pipeline_parallel = options.pipeline_model_parallel_size;
  asked.expert_parallel = options.expert_model_parallel_size;
  asked.expert_tensor_parallel = expert_tensor_parallel_of(options);
  asked.optimizer_instances = options.num_distributed_optimizer_instances;
  asked.dispatch_node_ranks = dispatch_node_ranks_of(options);
  // Without it every rank of a tp group would send the same tokens to the experts.
  asked.sequence_parallel = options.sequence_parallel || config.num_experts > 0;
  asked.key_value_heads = config.num_query_groups;
  asked.order = options.rank_order;
  return asked;
}

PipelineShape shape_of(const Options& options, const ModelConfig& config, const Layout& layout,
                       int32_t chunks) {
  PipelineShape shape;
  shape.schedule = options.pipeline_schedule;
  shape.ranks = layout.pp();
  shape.chunks = chunks;
  shape.micro_batches = make_batch_sizes(options, sequence_length_of(options, config)).largest() /
                        (options.micro_batch_size * layout.dp());
  // Forward passes alone go from stage to stage in any number.
  if (options.command == Command::eval || options.command == Command::generate) {
    shape.micro_batches = std::max(shape.micro_batches, shape.ranks);
  }
  shape.group_size = options.microbatch_group_size_per_virtual_pipeline_stage.value_or(0);
  shape.merged = options.overlap_moe_expert_parallel_comm;
  if (shape.merged && layout.ep() * layout.etp() == 1) {
    throw_bad_request(
        "--overlap-moe-expert-parallel-comm hides exchanges between ranks that share the experts; "
        "here each rank has all of them. Add --expert-model-parallel-size, or leave it out.");
  }
  const std::optional<Refusal> refusal = check_shape(shape);
  if (refusal && refusal->setting == Setting::global_batch_size &&
      options.command == Command::verify) {
    throw_bad_request(fmt::format(
        "--pipeline-model-parallel-size {}: virtual stages need as many micro-batches, "
        "and the reference has {} {} for each replica. Use fewer ranks of the "
        "pipeline, or leave the virtual stages out.",
        shape.ranks, shape.micro_batches, shape.micro_batches == 1 ? "sequence" : "sequences"));
  }
  require_accepted(refusal);
  return shape;
}

// Of ranks that are planned here: the nodes of --gpus, or one machine.
std::vector<int32_t> machines_of_ranks(const Options& options) {
  std::vector<int32_t> machines(static_cast<size_t>(options.ranks), 0);
  if (const std::optional<GpuCluster> cluster = gpu_cluster_of(options)) {
    for (int32_t rank = 0; rank < options.ranks; ++rank) {
      machines[static_cast<size_t>(rank)] = cluster->node_of(rank);
    }
  }
  return machines;
}

int32_t expert_clones_of(const Options& options, const ModelConfig& config) {
  const int32_t clones = options.moe_expert_clones;
  if (clones == 0 || config.num_experts == 0) return 0;
  if (config.moe_pad_expert_input_to_capacity) {
    throw_bad_request(
        fmt::format("--moe-expert-clones {}: with --moe-pad-expert-input-to-capacity every expert "
                    "works on as many rows, and none is hot. Leave one of them out.",
                    clones));
  }
  const PrecisionOptions precision = precision_options_of(options, config);
  for (int32_t layer = 0; precision.any() && layer < config.all_layers(); ++layer) {
    if (!config.is_moe_layer(layer) ||
        keeps_products(precision.kept, layer, ProductGroup::experts)) {
      continue;
    }
    throw_bad_request(
        fmt::format("--moe-expert-clones {}: copies of experts whose products are in 8 or 4 bits "
                    "are not there. Name in --fp8-modules what else has such products, as "
                    "attention, or leave one of them out.",
                    clones));
  }
  return clones;
}

// The head's gradients would come between those of the embedding, which such schedules move.
void refuse_loss_chunks(const Options& options, const ModelConfig& config,
                        const PipelinePartition& partition, const PipelineShape& shape) {
  if (options.loss_chunk_tokens == 0 || !config.tie_embeddings) return;
  const std::vector<int32_t> embeds = partition.embedding_ranks(/*tied=*/false);
  if (!std::binary_search(embeds.begin(), embeds.end(), partition.rank_of_loss())) return;
  if (!shape.merged && shape.schedule == PipelineSchedule::one_f_one_b) return;
  throw_bad_request(
      "--loss-chunk-tokens: here the rank of the head has the embedding, too, with the same "
      "weights, and its gradients are moved by --overlap-moe-expert-parallel-comm or a "
      "zero-bubble schedule. Leave one of them out.");
}

}  // namespace

RunLayout run_layout_of(const Options& options, const ModelConfig& config,
                        const ProcessGroup* group) {
  const StateSharding sharding = sharding_of(options);
  if (options.num_distributed_optimizer_instances > 1 && sharding == StateSharding::none) {
    throw_bad_request(
        fmt::format("--num-distributed-optimizer-instances {}: it says among how many ranks state "
                    "is sharded; add --use-distributed-optimizer or --use-megatron-fsdp.",
                    options.num_distributed_optimizer_instances));
  }
  LayoutOptions asked = sizes_of(options, config);
  require_accepted(try_layout(asked));
  PipelinePartition partition = partition_of(options, config);
  asked.embedding_places = partition.embedding_ranks(config.tie_embeddings);
  Layout layout(std::move(asked));
  require_accepted(check_layout(config, layout, sequence_length_of(options, config),
                                context_exchange_of(options)));
  std::shared_ptr<const Optimizer> optimizer = optimizer_of(options, config, layout, sharding);
  const PipelineShape schedule = shape_of(options, config, layout, partition.chunks);
  refuse_loss_chunks(options, config, partition, schedule);
  std::array<bool, kRankGroupCount> is_staged{};
  if (options.device == Device::cuda) {
    is_staged =
        staged_groups_of(layout, options.gpu_exchange,
                         group == nullptr ? machines_of_ranks(options) : group->machine_of_rank(),
                         options.ranks_per_gpu);
  }
  return {.layout = std::move(layout),
          .partition = std::move(partition),
          .schedule = schedule,
          .sharding = sharding,
          .main_gradients = main_gradient_dtype(options),
          .optimizer = std::move(optimizer),
          .optimizer_offload = optimizer_offload_of(options),
          .amax_history = amax_history_of(options),
          .weight_codes = weight_codes_of(options, config),
          .expert_room = options.moe_expert_rank_capacity_factor.value_or(0),
          .expert_clones = expert_clones_of(options, config),
          .is_staged = is_staged};
}

std::array<bool, kRankGroupCount> staged_groups_of(const Layout& layout, GpuExchange exchange,
                                                   const std::vector<int32_t>& machine_of_rank,
                                                   int32_t ranks_per_gpu) {
  std::array<bool, kRankGroupCount> is_staged{};
  const auto machine = [&](int32_t rank) { return machine_of_rank[static_cast<size_t>(rank)]; };
  const bool is_one = std::all_of(machine_of_rank.begin(), machine_of_rank.end(),
                                  [&](int32_t each) { return each == machine_of_rank.front(); });
  if (is_one && exchange != GpuExchange::nccl) return is_staged;
  bool any = false;
  for (size_t i = 0; i < kRankGroupCount; ++i) {
    is_staged[i] = layout.any_group(static_cast<RankGroup>(i), [&](const auto& ranks) {
      const bool spans = std::any_of(ranks.begin(), ranks.end(), [&](int32_t rank) {
        return machine(rank) != machine(ranks.front());
      });
      if (spans && exchange == GpuExchange::peer) {
        throw_bad_request(
            "--gpu-exchange peer: the ranks lie on several machines, whose GPUs do not reach each "
            "other's memory. Leave the flag out, or use --gpu-exchange nccl.");
      }
      return ranks.size() > 1 && (spans || exchange == GpuExchange::nccl);
    });
    any |= is_staged[i];
  }
  if (any && ranks_per_gpu > 1) {
    throw_bad_request(fmt::format(
        "--ranks-per-gpu {}: NCCL, through which {}, needs a GPU for each rank. Leave the flag "
        "out{}.",
        ranks_per_gpu,
        exchange == GpuExchange::nccl ? "--gpu-exchange nccl lets them exchange"
                                      : "GPUs of several machines exchange",
        exchange == GpuExchange::nccl ? ", or use --gpu-exchange peer" : ""));
  }
  return is_staged;
}

void check_runnable_layout(const Options& options) {
  const auto refuse_above_one = [&](std::string_view flag, int32_t size) {
    if (size == 1) return;
    throw_bad_request(fmt::format("{} {}: troupe {} works with one rank. Leave the flag out.", flag,
                                  size, info_of(options.command).name));
  };
  refuse_above_one("--tensor-model-parallel-size", options.tensor_model_parallel_size);
  refuse_above_one("--context-parallel-size", options.context_parallel_size);
  refuse_above_one("--pipeline-model-parallel-size", options.pipeline_model_parallel_size);
  refuse_above_one("--expert-model-parallel-size", options.expert_model_parallel_size);
  refuse_above_one("--expert-tensor-parallel-size",
                   options.expert_tensor_parallel_size.value_or(1));
  refuse_above_one("--num-virtual-stages-per-pipeline-rank",
                   options.num_virtual_stages_per_pipeline_rank.value_or(1));
}

}  // namespace troupe
