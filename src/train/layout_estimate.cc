#include "train/layout_estimate.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "model/parameters.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/step_time.h"
#include "train/expert_room_choice.h"

namespace troupe {
namespace {

constexpr int32_t kLongestPeriod = 8;
constexpr int32_t kNoLayer = -1;  // embedding, head and loss

bool are_alike(const ModelConfig& config, int32_t a, int32_t b) {
  return config.is_moe_layer(a) == config.is_moe_layer(b) &&
         config.has_window(a) == config.has_window(b) &&
         config.has_linear_attention(a) == config.has_linear_attention(b);
}

// After how many layers, from `first` on, kinds of layers repeat. Where they do not, the most that
// are looked at: their mean stands for all.
int32_t period_of(const ModelConfig& config, int32_t first) {
  const auto repeats = [&](int32_t period) {
    for (int32_t i = first; i + period < config.num_layers; ++i) {
      if (!are_alike(config, i, i + period)) return false;
    }
    return true;
  };
  int32_t period = 1;
  while (period < kLongestPeriod && !repeats(period)) ++period;
  return period;
}

// The model from layer `first` on, with N layers, the last `period` of them repeated, and
// none of multi-token prediction.
ModelConfig with_layers(ModelConfig config, int32_t first, int32_t layers, int32_t period) {
  for (std::vector<bool>* kinds :
       {&config.window_layers, &config.linear_attention_layers, &config.moe_layers}) {
    if (kinds->empty()) continue;
    kinds->erase(kinds->begin(), kinds->begin() + first);
    while (static_cast<int32_t>(kinds->size()) < layers) {
      kinds->push_back((*kinds)[kinds->size() - static_cast<size_t>(period)]);
    }
    kinds->resize(static_cast<size_t>(layers));
  }
  config.num_layers = layers;
  config.mtp_num_layers = 0;
  return config;
}

struct Measured {
  double seconds = 0;
  double bytes = 0;                // beside state
  std::map<int32_t, double> work;  // seconds of the first micro-batch's compute by layer
};

Measured measure_step(Options options, const ModelConfig& config, const GpuCluster& cluster,
                      int32_t micro_batches) {
  options.global_batch_size =
      micro_batches * options.micro_batch_size * data_parallel_size_of(options);
  const StepSpec spec = step_spec_of(options, config);
  const TrainingStep step = build_training_step(config, spec.state_of(0), spec.options);
  const MemoryPlan memory =
      plan_memory(*step.program, /*threads=*/1, Device::cuda, cluster.model.traits);
  const TimedProgram timed = time_program(*step.program, memory, cluster, spec.layout->layout, 0);
  const std::array<const TimedProgram*, 1> programs = {&timed};
  Measured measured = {.seconds = simulate_step(programs, cluster.model.launch_seconds).seconds,
                       .bytes = static_cast<double>(memory.device_bytes() - memory.state_bytes),
                       .work = {}};
  for (int32_t i = 0; i < step.program->op_count(); ++i) {
    const TimedOperation& operation = timed.operations[static_cast<size_t>(i)];
    const Place& place = step.program->op(i).place;
    if (operation.queue != Queue::compute || place.micro_batch != 0) continue;
    measured.work[place.layer] += operation.seconds;
  }
  return measured;
}

// Stages that are needed where none takes longer than `most`.
int32_t stages_needed(const std::vector<double>& weights, double most) {
  int32_t stages = 1;
  double sum = 0;
  for (const double weight : weights) {
    if (sum + weight > most && sum > 0) {
      ++stages;
      sum = 0;
    }
    sum += weight;
  }
  return stages;
}

// How many parts each stage has: the longest stage is as short as can be, and all are as equal as
// that allows. Some may be empty.
std::vector<int32_t> balance_stages(const std::vector<double>& weights, int32_t stages) {
  double low = *std::max_element(weights.begin(), weights.end());
  double high = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (int32_t i = 0; i < 24; ++i) {
    const double middle = (low + high) / 2;
    (stages_needed(weights, middle) <= stages ? high : low) = middle;
  }
  const double most = high * (1 + 1e-9);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const size_t parts = weights.size();
  // By number of stages and of parts in them: the least sum of squares, and the last one's parts.
  std::vector<double> before(parts + 1, kNever);
  before[0] = 0;
  std::vector<std::vector<int32_t>> taken;
  for (int32_t stage = 0; stage < stages; ++stage) {
    std::vector<double> sums(parts + 1, kNever);
    taken.emplace_back(parts + 1, 0);
    for (size_t end = 0; end <= parts; ++end) {
      double weight = 0;
      for (size_t begin = end + 1; begin-- > 0 && weight <= most;) {
        const double sum = before[begin] + weight * weight;
        if (sum < sums[end]) {
          sums[end] = sum;
          taken.back()[end] = static_cast<int32_t>(end - begin);
        }
        if (begin > 0) weight += weights[begin - 1];
      }
    }
    before = std::move(sums);
  }
  std::vector<int32_t> result(static_cast<size_t>(stages), 0);
  size_t end = parts;
  for (size_t stage = result.size(); stage-- > 0;) {
    result[stage] = taken[stage][end];
    end -= static_cast<size_t>(result[stage]);
  }
  return result;
}

// As parse_partition reads it, stages that are alike written once: "Et*2|(t*3|)*14t*2L".
std::string text_of_stages(const PipelinePartition& partition) {
  std::vector<std::string> texts;
  for (const PipelineStage& stage : partition.stages) {
    texts.push_back(to_text({.ranks = 1, .chunks = 1, .stages = {stage}}));
  }
  std::string text;
  for (size_t i = 0; i < texts.size();) {
    size_t alike = 1;
    // Each of them ends with a bar, so the last stage is none of them.
    while (i + alike + 1 < texts.size() && texts[i + alike] == texts[i]) ++alike;
    if (i + 1 == texts.size()) {
      text += texts[i];
    } else if (alike > 2) {
      text += fmt::format("({}|)*{}", texts[i], alike);
    } else {
      for (size_t j = 0; j < alike; ++j) text += texts[i] + "|";
    }
    i += alike;
  }
  return text;
}

}  // namespace

LayoutEstimator::LayoutEstimator(const LayoutSpace& space, const ModelConfig& config,
                                 const GpuCluster& cluster)
    : space_(space),
      config_(config),
      cluster_(cluster),
      model_(std::make_shared<const Model>(config)) {
  while (config.num_experts > 0 && dense_layers_ + 1 < config.num_layers &&
         !config.is_moe_layer(dense_layers_)) {
    ++dense_layers_;
  }
  period_ = period_of(config, dense_layers_);
  cluster_.expert_load = cluster.expert_load.averaged();
  if (config.num_experts > 0) {
    const double matrices = config.gated_linear_unit ? 3 : 2;
    expert_parameters_ = static_cast<double>(config.moe_layer_count()) * config.num_experts *
                         matrices * config.moe_ffn_hidden_size * config.hidden_size;
  }
  other_parameters_ = static_cast<double>(model_->parameter_count()) - expert_parameters_;
}

double LayoutEstimator::least_state_bytes(const LayoutChoice& choice) const {
  const Options& options = space_.options();
  // A weight and its gradient.
  const double held = is_half(options.compute_dtype) ? 4 : 8;
  const auto of_rank = [&](double parameters, int32_t slices) {
    const bool all = choice.sharding == ShardingChoice::all || options.use_megatron_fsdp;
    return parameters * held / (all ? options.ranks : slices * choice.pp);
  };
  return of_rank(expert_parameters_, choice.ep * choice.etp) +
         of_rank(other_parameters_, choice.tp);
}

LayoutEstimator::Unit LayoutEstimator::unit_of(const LayoutChoice& choice) const {
  const bool gathers = choice.sharding == ShardingChoice::all || space_.options().use_megatron_fsdp;
  const int32_t ranks = gathers ? space_.options().ranks / choice.pp : 0;
  return {choice.tp,          choice.cp, choice.ep,        choice.etp,
          choice.micro_batch, ranks,     choice.recompute, choice.dispatcher};
}

UnitCosts LayoutEstimator::measure(const LayoutChoice& choice) const {
  Options options = with_least_expert_room(space_.apply(choice), config_, cluster_.expert_load);
  options.pipeline_model_parallel_size = 1;
  options.num_virtual_stages_per_pipeline_rank.reset();
  options.num_layers_per_virtual_pipeline_stage.reset();
  options.pipeline_model_parallel_layout.clear();
  options.decoder_first_pipeline_num_layers.reset();
  options.decoder_last_pipeline_num_layers.reset();
  options.microbatch_group_size_per_virtual_pipeline_stage.reset();
  options.pipeline_schedule = PipelineSchedule::one_f_one_b;
  options.rampup_batch_size.clear();
  options.step_batch_size_schedule.clear();
  if (options.recompute_num_layers) options.recompute_num_layers = 1;
  const int32_t shared = std::get<5>(unit_of(choice));
  options.ranks = shared > 0 ? shared : std::lcm(choice.tp * choice.cp, choice.ep * choice.etp);

  // One of the dense layers stands for all.
  const int32_t first = std::max(0, dense_layers_ - 1);
  const int32_t few = dense_layers_ - first + period_;
  const ModelConfig small = with_layers(config_, first, few, period_);
  const ModelConfig large = with_layers(config_, first, few + period_, period_);
  const Measured one = measure_step(options, small, cluster_, 1);
  const Measured one_of_large = measure_step(options, large, cluster_, 1);
  const double small_each = measure_step(options, small, cluster_, 2).seconds - one.seconds;
  const double large_each =
      measure_step(options, large, cluster_, 2).seconds - one_of_large.seconds;

  UnitCosts costs;
  const double period = period_;
  costs.layer = std::max(0.0, large_each - small_each) / period;
  const double rest = std::max(0.0, small_each - period * costs.layer);
  costs.head = dense_layers_ > 0 ? std::min(rest, one.work.at(kNoLayer)) : rest;
  costs.dense_layer = rest - costs.head;
  if (config_.mtp_num_layers > 0) {
    ModelConfig predicting = small;
    predicting.mtp_num_layers = 1;
    const auto work = measure_step(options, predicting, cluster_, 1).work;
    costs.mtp_layer = costs.layer + std::max(0.0, work.at(few) - work.at(few - 1));
  }
  const double small_once = one.seconds - small_each;
  const double large_once = one_of_large.seconds - large_each;
  costs.update_of_layer = std::max(0.0, large_once - small_once) / period;
  costs.update_of_rest = std::max(0.0, small_once - period * costs.update_of_layer);
  costs.layer_bytes = std::max(0.0, one_of_large.bytes - one.bytes) / period;
  costs.rest_bytes = std::max(0.0, one.bytes - few * costs.layer_bytes);
  return costs;
}

// Layers, those of multi-token prediction, and the loss with the heads of all depths. A layer that
// serves all depths is one part, because it stays on one rank.
std::vector<LayoutEstimator::Part> LayoutEstimator::parts_of(const UnitCosts& costs) const {
  std::vector<Part> parts;
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    parts.push_back(
        {.seconds = layer < dense_layers_ ? costs.dense_layer : costs.layer, .layers = 1});
  }
  const int32_t depths = config_.mtp_num_layers;
  const int32_t at_once = config_.mtp_use_repeated_layer ? depths : 1;
  for (int32_t depth = 0; depth < depths; depth += at_once) {
    parts.push_back({.seconds = at_once * costs.mtp_layer, .mtp_layers = at_once});
  }
  parts.push_back({.seconds = (1 + depths) * costs.head});
  return parts;
}

double LayoutEstimator::seconds(const UnitCosts& costs, LayoutChoice& choice) const {
  const std::vector<Part> parts = parts_of(costs);
  std::vector<double> weights;
  for (const Part& part : parts) weights.push_back(part.seconds);
  const int32_t stages = choice.pp * choice.vpp;
  const std::vector<int32_t> parts_of_stage = balance_stages(weights, stages);
  std::vector<double> of_rank(static_cast<size_t>(choice.pp), 0.0);
  std::vector<int32_t> layers_of_rank(static_cast<size_t>(choice.pp), 0);
  PipelinePartition partition{.ranks = choice.pp, .chunks = choice.vpp, .stages = {}};
  const Part* part = parts.data();
  bool is_even = true;
  for (int32_t number = 0; number < stages; ++number) {
    PipelineStage stage;
    stage.embedding = number == 0;
    stage.loss = number + 1 == stages;
    const auto rank = static_cast<size_t>(number % choice.pp);
    for (int32_t i = 0; i < parts_of_stage[static_cast<size_t>(number)]; ++i, ++part) {
      of_rank[rank] += part->seconds;
      stage.layers += part->layers;
      stage.mtp_layers += part->mtp_layers;
    }
    layers_of_rank[rank] += stage.layers + stage.mtp_layers;
    is_even = is_even && stage.layers * stages == config_.num_layers &&
              stage.mtp_layers == (stage.loss ? config_.mtp_num_layers : 0);
    partition.stages.push_back(stage);
  }
  choice.stages = choice.pp == 1 || is_even ? "" : text_of_stages(partition);
  const double longest = *std::max_element(of_rank.begin(), of_rank.end());
  const double all = std::accumulate(of_rank.begin(), of_rank.end(), 0.0);
  const int32_t most_layers = *std::max_element(layers_of_rank.begin(), layers_of_rank.end());
  const double micro_batches = static_cast<double>(*space_.options().global_batch_size) /
                               choice.micro_batch * (choice.tp * choice.cp * choice.pp) /
                               space_.options().ranks;
  return costs.update_of_rest + costs.update_of_layer * most_layers + micro_batches * longest +
         (all - longest) / choice.vpp;
}

LayoutEstimator::Bytes LayoutEstimator::bytes(const UnitCosts& costs,
                                              const LayoutChoice& choice) const {
  const Options options =
      with_least_expert_room(space_.apply(choice), config_, cluster_.expert_load);
  const auto run = std::make_shared<const RunLayout>(run_layout_of(options, config_));
  Bytes most;
  const int32_t pp = run->layout.pp();
  const int32_t vpp = run->partition.chunks;
  const auto first_rank = [&](int32_t place) {
    return run->layout.rank_of(DensePlace{.pp = place});
  };
  const auto layers_of = [&](int32_t place) {
    int32_t layers = 0;
    for (int32_t chunk = 0; chunk < vpp; ++chunk) {
      const PipelineStage stage = ModelPart{.run = run, .rank = first_rank(place)}.stage(chunk);
      layers += stage.layers + stage.mtp_layers;
    }
    return layers;
  };
  const auto kept_by = [&](int32_t place) {
    const double warm_up = vpp == 1 ? pp - place : 2.0 * (pp - place - 1) + (vpp - 1) * pp + 1;
    const double in_flight = std::min<double>(run->schedule.micro_batches, warm_up / vpp);
    return costs.layer_bytes * layers_of(place) * in_flight;
  };
  int32_t fullest = 0;
  for (int32_t place = 1; place < pp; ++place) {
    if (kept_by(place) > kept_by(fullest)) fullest = place;
  }
  std::set<int32_t> places = {0, fullest, pp - 1};
  for (const int32_t place : run->partition.mtp_ranks()) places.insert(place);
  for (const int32_t place : places) {
    const ModelState state = declare_model_state(model_, options.compute_dtype, /*trained=*/true,
                                                 {.run = run, .rank = first_rank(place)});
    const StateLayout layout(*state.table);
    const double kept = kept_by(place) + costs.rest_bytes;
    most.state = std::max(most.state, layout.bytes);
    most.all = std::max(most.all, layout.bytes + static_cast<uint64_t>(kept));
  }
  return most;
}

}  // namespace troupe
