#include "train/layout_choice.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>

#include "base/text.h"
#include "options/model_options.h"

namespace troupe {
namespace {

constexpr int32_t kMostTensorParallel = 8;
constexpr int32_t kMostStages = 32;           // ranks of a pipeline
constexpr int32_t kMostVirtualStages = 8;     // of a rank
constexpr int32_t kMostMicroBatch = 4;        // sequences
constexpr int64_t kMostTokens = 16384;        // of a rank's micro-batch of several sequences
constexpr int32_t kLeastTokensOfRank = 4096;  // of a sequence, before CP is worth its exchange
// Of the ranks that share the experts: where a token goes to more of them, it goes to all, because
// less would hardly be sent, and rows would have to be counted and packed.
constexpr double kNearlyAll = 0.9;
constexpr std::string_view kOnlyOfPlans[] = {"gpus", "search", "search-top",        "search-output",
                                             "json", "config", "fake-process-group"};

std::vector<int32_t> powers_up_to(int32_t most) {
  std::vector<int32_t> sizes;
  for (int32_t size = 1; size <= most; size *= 2) sizes.push_back(size);
  return sizes;
}

std::vector<int32_t> divisors_of(int32_t number, int32_t most) {
  std::vector<int32_t> sizes;
  for (int32_t size = 1; size <= std::min(number, most); ++size) {
    if (number % size == 0) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

LayoutSpace::LayoutSpace(const Options& options, const ModelConfig& config, int32_t gpus_per_nvlink)
    : options_(options), config_(config), gpus_per_nvlink_(gpus_per_nvlink) {
  options_.search = false;
}

bool LayoutSpace::is_free(std::string_view flag) const {
  return !was_given(options_, flag);
}

bool LayoutSpace::recompute_is_free() const {
  return !options_.recompute_granularity && options_.recompute_modules.empty() &&
         !options_.moe_layer_recompute && !options_.checkpoint_activations;
}

bool LayoutSpace::sharding_is_free() const {
  return is_free("use-distributed-optimizer") && is_free("use-megatron-fsdp") &&
         is_free("data-parallel-sharding-strategy") && options_.optimizer == OptimizerKind::adam;
}

bool LayoutSpace::stages_are_free() const {
  return is_free("num-virtual-stages-per-pipeline-rank") &&
         is_free("num-layers-per-virtual-pipeline-stage") &&
         is_free("pipeline-model-parallel-layout") &&
         is_free("decoder-first-pipeline-num-layers") &&
         is_free("decoder-last-pipeline-num-layers") &&
         is_free("account-for-embedding-in-pipeline-split") &&
         is_free("account-for-loss-in-pipeline-split");
}

bool LayoutSpace::spans_full_nodes(const LayoutChoice& choice) const {
  const int32_t ranks = choice.ep * choice.etp;
  return gpus_per_nvlink_ > 1 && ranks > gpus_per_nvlink_ && ranks % gpus_per_nvlink_ == 0 &&
         gpus_per_nvlink_ % choice.etp == 0 && is_free("rank-order");
}

std::vector<std::string> LayoutSpace::cheap_modules() const {
  std::vector<std::string> modules;
  modules.emplace_back("layernorm");
  if (config_.num_experts > 0) modules.emplace_back("moe_act");
  if (config_.multi_latent_attention) modules.emplace_back("mla_up_proj");
  return modules;
}

std::vector<LayoutChoice> LayoutSpace::enumerate() const {
  const auto sizes = [&](std::string_view flag, int32_t given, std::vector<int32_t> otherwise) {
    return is_free(flag) ? std::move(otherwise) : std::vector<int32_t>{given};
  };
  const int32_t gpus = options_.ranks;
  const int32_t batch = *options_.global_batch_size;
  const bool has_experts = config_.num_experts > 0;
  const int32_t sequence = sequence_length_of(options_, config_);
  const auto tensor = sizes("tensor-model-parallel-size", options_.tensor_model_parallel_size,
                            powers_up_to(std::min(kMostTensorParallel, gpus_per_nvlink_)));
  const auto context = sizes("context-parallel-size", options_.context_parallel_size,
                             powers_up_to(std::max(1, sequence / kLeastTokensOfRank)));
  const auto pipeline = sizes("pipeline-model-parallel-size", options_.pipeline_model_parallel_size,
                              divisors_of(gpus, std::min(kMostStages, config_.num_layers)));
  const auto expert =
      sizes("expert-model-parallel-size", options_.expert_model_parallel_size,
            has_experts ? divisors_of(config_.num_experts, gpus) : std::vector<int32_t>{1});
  const auto micro_batches =
      sizes("micro-batch-size", options_.micro_batch_size, powers_up_to(kMostMicroBatch));
  using enum RecomputeChoice;
  const std::vector<RecomputeChoice> recomputes =
      recompute_is_free() ? std::vector{none, cheap, full} : std::vector{none};
  const bool dispatcher_is_free = is_free("moe-token-dispatcher-type");

  std::vector<LayoutChoice> choices;
  LayoutChoice choice;
  const auto add_with_details = [&](int32_t replicas) {
    const double copies = has_experts ? expected_copies(config_, choice.ep, choice.etp) : 1;
    const bool goes_to_all = copies > kNearlyAll * choice.ep * choice.etp;
    choice.dispatcher = !dispatcher_is_free        ? options_.moe_token_dispatcher_type
                        : spans_full_nodes(choice) ? TokenDispatcher::hierarchical
                        : goes_to_all              ? TokenDispatcher::allgather
                                                   : TokenDispatcher::alltoall;
    std::vector<ShardingChoice> shardings = {ShardingChoice::none};
    if (sharding_is_free() && replicas * choice.cp > 1) {
      // Parameters that are gathered for every micro-batch of a pipeline cost more than they save.
      shardings = {ShardingChoice::optimizer};
      if (choice.pp == 1) shardings.push_back(ShardingChoice::all);
    }
    for (const ShardingChoice sharding : shardings) {
      for (const RecomputeChoice recompute : recomputes) {
        choice.sharding = sharding;
        choice.recompute = recompute;
        choices.push_back(choice);
      }
    }
  };
  const auto add_with_experts = [&](int32_t replicas) {
    const auto expert_tensor =
        sizes("expert-tensor-parallel-size", options_.expert_tensor_parallel_size.value_or(1),
              choice.tp > 1 && has_experts ? std::vector{1, choice.tp} : std::vector{1});
    for (const int32_t ep : expert) {
      for (const int32_t etp : expert_tensor) {
        if (gpus / choice.pp % (ep * etp) != 0) continue;
        choice.ep = ep;
        choice.etp = etp;
        add_with_details(replicas);
      }
    }
  };
  for (const int32_t tp : tensor) {
    for (const int32_t cp : context) {
      for (const int32_t pp : pipeline) {
        if (gpus % (tp * cp * pp) != 0) continue;
        const int32_t replicas = gpus / (tp * cp * pp);
        for (const int32_t micro_batch : micro_batches) {
          const int64_t tokens = int64_t{micro_batch} * sequence / (tp * cp);
          if (micro_batch > 1 && is_free("micro-batch-size") && tokens > kMostTokens) continue;
          if (batch % (int64_t{micro_batch} * replicas) != 0) continue;
          const int32_t of_rank = batch / (micro_batch * replicas);
          const int32_t most_virtual = pp > 1 && stages_are_free() && of_rank % pp == 0
                                           ? std::min(kMostVirtualStages, config_.num_layers / pp)
                                           : 1;
          for (const int32_t vpp : powers_up_to(most_virtual)) {
            choice = {};
            choice.tp = tp;
            choice.cp = cp;
            choice.pp = pp;
            choice.vpp = vpp;
            choice.micro_batch = micro_batch;
            add_with_experts(replicas);
          }
        }
      }
    }
  }
  return choices;
}

std::vector<std::pair<std::string, std::string>> LayoutSpace::flags_of(
    const LayoutChoice& choice) const {
  std::vector<std::pair<std::string, std::string>> flags;
  const auto say = [&](const char* name, std::string value) {
    if (is_free(name)) flags.emplace_back(name, std::move(value));
  };
  const auto say_if = [&](bool is_set, const char* name) {
    if (is_set) say(name, "true");
  };
  say("tensor-model-parallel-size", std::to_string(choice.tp));
  say("context-parallel-size", std::to_string(choice.cp));
  say("pipeline-model-parallel-size", std::to_string(choice.pp));
  if (stages_are_free() && !choice.stages.empty()) {
    say("pipeline-model-parallel-layout", choice.stages);
  } else if (stages_are_free() && choice.vpp > 1) {
    say("num-virtual-stages-per-pipeline-rank", std::to_string(choice.vpp));
  }
  if (config_.num_experts > 0) {
    say("expert-model-parallel-size", std::to_string(choice.ep));
    say("expert-tensor-parallel-size", std::to_string(choice.etp));
    if (choice.ep * choice.etp > 1) {
      say("moe-token-dispatcher-type", std::string(name_of(choice.dispatcher)));
      if (choice.dispatcher == TokenDispatcher::hierarchical) {
        say("moe-dispatch-ranks-per-node", std::to_string(gpus_per_nvlink_));
      }
    }
  }
  say("micro-batch-size", std::to_string(choice.micro_batch));
  if (recompute_is_free() && choice.recompute == RecomputeChoice::full) {
    flags.insert(flags.end(), {{"recompute-granularity", "full"},
                               {"recompute-method", "uniform"},
                               {"recompute-num-layers", "1"}});
  } else if (recompute_is_free() && choice.recompute == RecomputeChoice::cheap) {
    flags.emplace_back("recompute-granularity", "selective");
    for (const std::string& module : cheap_modules())
      flags.emplace_back("recompute-modules", module);
  }
  if (sharding_is_free()) {
    say_if(choice.sharding == ShardingChoice::optimizer, "use-distributed-optimizer");
    say_if(choice.sharding == ShardingChoice::all, "use-megatron-fsdp");
  }
  if (choice.schedule != PipelineSchedule::one_f_one_b) {
    say("pipeline-schedule", std::string(name_of(choice.schedule)));
  }
  say_if(choice.overlap_gradients, "overlap-grad-reduce");
  say_if(choice.overlap_gradients && choice.sharding != ShardingChoice::none,
         "overlap-param-gather");
  say_if(choice.overlap_experts, "overlap-moe-expert-parallel-comm");
  say_if(choice.delay_weights, "delay-wgrad-compute");
  say_if(choice.overlap_shared_expert, "moe-shared-expert-overlap");
  return flags;
}

Options LayoutSpace::apply(const LayoutChoice& choice) const {
  Options options = options_;
  for (const auto& [name, value] : flags_of(choice)) {
    const OptionSpec* spec = find_option(name);
    set_option(options, *spec, value);
    options.given.push_back(spec->name);
  }
  return options;
}

std::string LayoutSpace::to_file(const LayoutChoice& choice, double expert_room) const {
  Options options = apply(choice);
  if (expert_room > 0 && is_free("moe-expert-rank-capacity-factor")) {
    options.moe_expert_rank_capacity_factor = expert_room;
    options.given.emplace_back("moe-expert-rank-capacity-factor");
  }
  if (is_free("device")) options.given.emplace_back("device");
  std::erase_if(options.given, [](std::string_view name) {
    return std::find(std::begin(kOnlyOfPlans), std::end(kOnlyOfPlans), name) !=
           std::end(kOnlyOfPlans);
  });
  return "# `troupe train --config FILE` and `troupe plan --config FILE` read this file; flags on "
         "the\n# command line win.\n" +
         given_to_toml(options);
}

std::string text_of_sizes(const LayoutChoice& choice) {
  std::string text;
  const auto add = [&](const char* name, int32_t size) {
    if (size > 1) text += fmt::format("{}{}{}", text.empty() ? "" : " ", name, size);
  };
  add("TP", choice.tp);
  add("CP", choice.cp);
  add("PP", choice.pp);
  if (choice.vpp > 1) text += fmt::format("x{}", choice.vpp);
  add("EP", choice.ep);
  add("ETP", choice.etp);
  return text.empty() ? "DP alone" : text;
}

}  // namespace troupe
