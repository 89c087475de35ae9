#include "cli/plan_layout.h"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <unistd.h>

#include "base/error.h"
#include "base/units.h"
#include "cli/plan_verdict.h"
#include "data/json_text.h"
#include "io/hf_config.h"
#include "model/parameter_layout.h"
#include "model/rank_parameters.h"
#include "train/terminal.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

constexpr int32_t kListedRanks = 16;       // beyond it, the text has no table of ranks and groups
constexpr size_t kListedMembers = 8;       // of a group, then the last one
constexpr int32_t kWrittenRanks = 4096;    // beyond it, JSON has none
constexpr size_t kWidestPicture = 240;     // columns
constexpr int64_t kMostSteps = 4'000'000;  // beyond it, a schedule is not carried out

// The kinds of groups that mean something in this layout.
std::vector<RankGroup> kinds_of(const Layout& layout) {
  std::vector<RankGroup> kinds;
  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    const bool of_instances = kind >= RankGroup::dp_cp_within_instance;
    if (of_instances && layout.options().optimizer_instances == 1) continue;
    const bool of_nodes =
        kind == RankGroup::etp_ep_across_nodes || kind == RankGroup::etp_ep_within_node;
    if (of_nodes && layout.options().dispatch_node_ranks == 0) continue;
    kinds.push_back(kind);
  }
  return kinds;
}

struct GradientRow {
  const char* name;
  const char* of;  // which parameters
  GradientClass kind;
};
constexpr GradientRow kGradientRows[] = {
    {"dense", "attention, dense MLPs, head", GradientClass::sliced},
    {"replicated", "router, norms, whole biases", GradientClass::replicated},
    {"head_norm", "norms of query and key heads", GradientClass::head_norm},
    {"embedding", "word embedding", GradientClass::embedding},
    {"expert", "experts", GradientClass::expert}};

// The pipeline, carried out.
struct Pipeline {
  std::vector<int32_t> peak_live;
  PipelineTimeline equal;     // stages take equally long
  PipelineTimeline weighted;  // stages take as long as they have flops
  std::string picture;        // empty: too large
};

// Forward flops of each stage's products for one token.
std::vector<double> stage_flops(const Model& model, const PipelinePartition& partition,
                                int32_t sequence) {
  std::vector<double> flops;
  for (const PipelineStage& stage : partition.stages) {
    double sum = stage.loss ? (1 + model.config().mtp_num_layers) * model.head_flops() : 0;
    for (int32_t i = 0; i < stage.layers; ++i) {
      sum += model.layer_flops(stage.first_layer + i, sequence);
    }
    for (int32_t i = 0; i < stage.mtp_layers; ++i) {
      sum += model.layer_flops(model.config().num_layers + i, sequence) + model.mtp_flops();
    }
    flops.push_back(sum);
  }
  return flops;
}

std::optional<Pipeline> run_pipeline(const RunLayout& run, const std::vector<double>& flops) {
  const PipelineShape& shape = run.schedule;
  if (int64_t{shape.micro_batches} * shape.stages() > kMostSteps) return std::nullopt;
  const PipelineTable table = build_pipeline_table(shape);
  const std::string fault = find_fault(table);
  TROUPE_CHECK(fault.empty(), "a schedule that can be carried out: " + fault);
  Pipeline pipeline;
  pipeline.peak_live = peak_live(table);
  pipeline.equal = simulate(table, {StageCost{}});
  std::vector<StageCost> costs;
  for (const double stage : flops) costs.push_back({stage, stage, stage});
  pipeline.weighted = simulate(table, costs);
  // A column of the picture has at least three characters.
  if (pipeline.equal.makespan * 3 < kWidestPicture && shape.ranks <= kListedRanks) {
    pipeline.picture = draw(table, pipeline.equal);
    if (pipeline.picture.find('\n') > kWidestPicture) pipeline.picture.clear();
  }
  return pipeline;
}

std::string count_of(int64_t count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

std::string stages_of(const PipelinePartition& partition, int32_t place) {
  PipelinePartition own;
  for (int32_t stage = 0; stage < static_cast<int32_t>(partition.stages.size()); ++stage) {
    if (partition.place_of(stage).rank != place) continue;
    own.stages.push_back(partition.stages[static_cast<size_t>(stage)]);
  }
  return to_text(own);
}

std::string describe_meshes(const Layout& layout) {
  return fmt::format(
      "{} ranks: TP {} x CP {} x DP {} x PP {}; experts ETP {} x EP {} x EDP {} x PP {}; order {}",
      layout.world_size(), layout.tp(), layout.cp(), layout.dp(), layout.pp(), layout.etp(),
      layout.ep(), layout.edp(), layout.pp(), layout.options().order);
}

std::string rank_table(const Layout& layout) {
  std::string text = "  rank   tp  cp  dp  pp   etp  ep edp\n";
  for (int32_t rank = 0; rank < layout.world_size(); ++rank) {
    const DensePlace dense = layout.dense_place(rank);
    const ExpertPlace expert = layout.expert_place(rank);
    text += fmt::format("  {:>4}  {:>3} {:>3} {:>3} {:>3}   {:>3} {:>3} {:>3}\n", rank, dense.tp,
                        dense.cp, dense.dp, dense.pp, expert.etp, expert.ep, expert.edp);
  }
  return text + "\n";
}

std::string group_table(const Layout& layout) {
  std::string text;
  std::string single;
  for (const RankGroup kind : kinds_of(layout)) {
    const std::vector<int32_t> first = layout.members(kind, 0);
    if (first.size() == 1) {
      single += fmt::format("{}{}", single.empty() ? "" : ", ", name_of(kind));
      continue;
    }
    text += fmt::format("  {:<10}", name_of(kind));
    if (layout.world_size() <= kListedRanks) {
      for (const auto& group : layout.groups(kind)) {
        text += fmt::format(" {{{}}}", fmt::join(group, " "));
      }
    } else {
      // The gap stands for at least two.
      const size_t shown = first.size() <= kListedMembers + 2 ? first.size() : kListedMembers;
      text +=
          fmt::format(" of {:>4} ranks: {{{}{}}}, ...", first.size(),
                      fmt::join(first.begin(), first.begin() + static_cast<int64_t>(shown), " "),
                      shown < first.size() ? fmt::format(" .. {}", first.back()) : "");
    }
    text += "\n";
  }
  if (!single.empty()) text += fmt::format("  of one rank each: {}\n", single);
  return text + "\n";
}

std::string describe_reduction(const Layout& layout, GradientClass kind) {
  const GradientReduction reduction = layout.reduction_of(kind);
  const auto size = [&](RankGroup group) { return layout.members(group, 0).size(); };
  std::string text;
  if (reduction.partial) {
    text += fmt::format("sum over {} ({}), then ", name_of(*reduction.partial),
                        size(*reduction.partial));
  }
  text += fmt::format("sum over {} ({})", name_of(reduction.replicas), size(reduction.replicas));
  if (reduction.copies) {
    text += fmt::format(", then sum over {}", name_of(*reduction.copies));
  }
  return text;
}

// What the gradients are of: how losses are divided, which is the only factor there is.
std::string describe_loss(const Layout& layout, const TrainingStepOptions& step) {
  if (step.per_token_loss) {
    return fmt::format("  {:<38}sum over tokens / tokens of the step\n", "loss");
  }
  return fmt::format("  {:<38}sum x 1/{:.0f} ({} on each of {} replicas)\n",
                     "loss of micro-batches", 1 / loss_gradient(step, layout), step.micro_batches,
                     layout.dp());
}

std::string gradient_table(const Layout& layout, const ModelConfig& config,
                           const TrainingStepOptions& step) {
  std::string text = describe_loss(layout, step);
  for (const GradientRow& row : kGradientRows) {
    if (row.kind == GradientClass::expert && config.num_experts == 0) continue;
    text += fmt::format("  {:<38}{}\n", row.of, describe_reduction(layout, row.kind));
  }
  return text + "\n";
}

// The rank of the pipeline place with the lowest number.
int32_t first_rank_of(const Layout& layout, int32_t place) {
  return layout.rank_of(DensePlace{.pp = place});
}

std::string parameter_table(const RunLayout& run, const ModelState& state) {
  std::string text = "  pp       dense    expert      weights  stages\n";
  for (int32_t place = 0; place < run.layout.pp(); ++place) {
    const RankParameters count =
        count_parameters(state, run.layout, run.partition, first_rank_of(run.layout, place));
    text += fmt::format("  {:>2}  {:>10}{:>10}{:>13}  {}\n", place,
                        format_count(static_cast<double>(count.dense)),
                        format_count(static_cast<double>(count.expert)), format_bytes(count.bytes),
                        stages_of(run.partition, place));
  }
  return text + "\n";
}

std::string describe_schedule(const PipelineShape& shape) {
  const bool interleaved = shape.schedule == PipelineSchedule::one_f_one_b && shape.chunks > 1;
  std::string text = fmt::format("{}{}: {} ranks", name_of(shape.schedule),
                                 interleaved ? " interleaved" : "", shape.ranks);
  if (shape.chunks > 1) text += fmt::format(" x {} stages", shape.chunks);
  if (interleaved) text += fmt::format(" in groups of {}", shape.group());
  if (shape.merged) text += ", forwards merged with backwards";
  return text + ", " + count_of(shape.micro_batches, "micro-batch", "micro-batches");
}

std::string pipeline_text(const RunLayout& run, const std::optional<Pipeline>& pipeline) {
  std::string text = "  " + describe_schedule(run.schedule) + "\n";
  if (!pipeline) return text + "  too many steps to be carried out here\n";
  const auto [least, most] =
      std::minmax_element(pipeline->peak_live.begin(), pipeline->peak_live.end());
  text += fmt::format(
      "  idle         {:.1f} % if all stages take equally long, {:.1f} % by their flops\n",
      100 * pipeline->equal.bubble, 100 * pipeline->weighted.bubble);
  text += fmt::format("  live at most {}{}",
                      *least == *most ? count_of(*most, "micro-batch", "micro-batches")
                                      : fmt::format("{} to {} micro-batches", *least, *most),
                      run.schedule.chunks > 1 ? " x stages on a rank" : " on a rank");
  if (run.schedule.ranks <= kListedRanks) {
    text += fmt::format(" (by rank: {})", fmt::join(pipeline->peak_live, " "));
  }
  text += "\n";
  if (pipeline->picture.empty()) return text;
  const bool split = run.schedule.schedule != PipelineSchedule::one_f_one_b;
  text += fmt::format("\n  F forward, {}; the number is the micro-batch{}\n\n",
                      split ? "D data gradient, W weight gradient" : "B backward",
                      run.schedule.chunks > 1 ? ", the letter after it the rank's stage" : "");
  return text + fit_lines(pipeline->picture, terminal_columns(STDOUT_FILENO));
}

ordered_json place_json(const Layout& layout, int32_t rank) {
  const DensePlace dense = layout.dense_place(rank);
  const ExpertPlace expert = layout.expert_place(rank);
  return {{"rank", rank},   {"tp", dense.tp},    {"cp", dense.cp},  {"dp", dense.dp},
          {"pp", dense.pp}, {"etp", expert.etp}, {"ep", expert.ep}, {"edp", expert.edp}};
}

ordered_json mesh_json(const Layout& layout, const TrainingStepOptions& step) {
  ordered_json json = {{"order", layout.options().order},
                       {"tp", layout.tp()},
                       {"cp", layout.cp()},
                       {"dp", layout.dp()},
                       {"pp", layout.pp()},
                       {"etp", layout.etp()},
                       {"ep", layout.ep()},
                       {"edp", layout.edp()}};
  for (const RankGroup kind : kinds_of(layout)) {
    json["group_sizes"][std::string(name_of(kind))] = layout.members(kind, 0).size();
  }
  json["groups"] = nullptr;
  json["ranks"] = nullptr;
  if (layout.world_size() <= kWrittenRanks) {
    for (const RankGroup kind : kinds_of(layout)) {
      json["groups"][std::string(name_of(kind))] = layout.groups(kind);
    }
    for (int32_t rank = 0; rank < layout.world_size(); ++rank) {
      json["ranks"].push_back(place_json(layout, rank));
    }
  }
  json["loss"] = {{"mean_over", step.per_token_loss ? "tokens" : "micro_batches"},
                  {"gradient", loss_gradient(step, layout)}};
  for (const GradientRow& row : kGradientRows) {
    const GradientReduction reduction = layout.reduction_of(row.kind);
    const auto group = [](const std::optional<RankGroup>& kind) {
      return kind ? ordered_json(name_of(*kind)) : ordered_json();
    };
    json["gradients"][row.name] = {{"partial", group(reduction.partial)},
                                   {"replicas", name_of(reduction.replicas)},
                                   {"copies", group(reduction.copies)}};
  }
  return json;
}

ordered_json pipeline_json(const RunLayout& run, const std::optional<Pipeline>& pipeline) {
  ordered_json json = {{"schedule", name_of(run.schedule.schedule)},
                       {"ranks", run.schedule.ranks},
                       {"stages_per_rank", run.schedule.chunks},
                       {"micro_batches", run.schedule.micro_batches},
                       {"layout", to_text(run.partition)},
                       {"bubble_equal_stages", nullptr},
                       {"bubble_by_flops", nullptr},
                       {"peak_live", nullptr}};
  if (!pipeline) return json;
  json["bubble_equal_stages"] = pipeline->equal.bubble;
  json["bubble_by_flops"] = pipeline->weighted.bubble;
  json["peak_live"] = pipeline->peak_live;
  return json;
}

}  // namespace

std::string describe_model(const Options& options, const ModelConfig& config) {
  const Model model(config);
  std::string text =
      fmt::format("model   {}: {} layers, hidden {}, {} parameters",
                  options.model.empty() ? "of the flags" : options.model, config.num_layers,
                  config.hidden_size, format_count(static_cast<double>(model.parameter_count())));
  if (config.num_experts > 0) {
    text += fmt::format(" ({} active), {} experts, top {}",
                        format_count(static_cast<double>(model.active_parameter_count())),
                        config.num_experts, config.moe_router_topk);
  }
  if (config.mtp_num_layers > 0) {
    text += fmt::format(", {} {} of multi-token prediction", config.own_mtp_layers(),
                        config.own_mtp_layers() == 1 ? "layer" : "layers");
    if (config.mtp_num_layers > config.own_mtp_layers()) {
      text += fmt::format(" used {} times", config.mtp_num_layers);
    }
  }
  text += fmt::format(", {}\n", value_text(options, "compute-dtype"));
  const std::string reason = why_no_hf_form(config);
  return reason.empty() ? text : text + reason + "\n";
}

std::string make_layout_text(const Options& options, const StepSpec& step,
                             const RanksReport* report) {
  const RunLayout& run = *step.layout;
  const ModelState state = declare_model_state(step.model, step.dtype, /*trained=*/false);
  const int32_t micro_batch_size = step.options.micro_batch_size;
  const int32_t sequence = step.options.sequence;
  const int64_t sequences =
      int64_t{run.schedule.micro_batches} * micro_batch_size * run.layout.dp();

  std::string text = describe_model(options, step.model);
  text += fmt::format("layout  {}\n", describe_meshes(run.layout));
  text += fmt::format(
      "step    {} of {} tokens: {} tokens; {} x {} on {}\n\n",
      count_of(sequences, "sequence", "sequences"), sequence, sequences * sequence,
      run.schedule.micro_batches, micro_batch_size,
      run.layout.dp() == 1 ? "one replica" : fmt::format("each of {} replicas", run.layout.dp()));
  if (run.layout.world_size() <= kListedRanks) {
    text += "Ranks\n" + rank_table(run.layout);
  }
  text += "Groups\n" + group_table(run.layout);
  text += "Gradients\n" + gradient_table(run.layout, step.model, step.options);
  text += "Parameters of one rank, by its place in the pipeline\n" + parameter_table(run, state);
  if (run.layout.pp() > 1) {
    const auto flops = stage_flops(*state.model, run.partition, sequence);
    text += "Pipeline\n" + pipeline_text(run, run_pipeline(run, flops)) + "\n";
  }
  if (report != nullptr) return text + make_ranks_text(*report, run.layout);
  return text +
         "With --fake-process-group the programs of all ranks are built and checked, and their "
         "memory is planned.\n";
}

std::string make_layout_json(const Options& options, const StepSpec& step,
                             const RanksReport* report) {
  const RunLayout& run = *step.layout;
  const ModelState state = declare_model_state(step.model, step.dtype, /*trained=*/false);
  ordered_json document = {{"fits", nullptr},
                           {"ranks", run.layout.world_size()},
                           {"parameters", state.model->parameter_count()},
                           {"active_parameters", state.model->active_parameter_count()},
                           {"layout", mesh_json(run.layout, step.options)},
                           {"parameters_per_rank", ordered_json::array()}};
  for (int32_t place = 0; place < run.layout.pp(); ++place) {
    const RankParameters count =
        count_parameters(state, run.layout, run.partition, first_rank_of(run.layout, place));
    document["parameters_per_rank"].push_back({{"pp", place},
                                               {"stages", stages_of(run.partition, place)},
                                               {"dense", count.dense},
                                               {"expert", count.expert},
                                               {"bytes", count.bytes}});
  }
  const auto flops = stage_flops(*state.model, run.partition, step.options.sequence);
  document["pipeline"] = pipeline_json(run, run_pipeline(run, flops));
  if (report != nullptr) add_ranks_json(document, *report, run.layout);
  if (report != nullptr && report->cluster) {
    add_verdict_json(document, verdict_of(options, step, *report));
  }
  return printed_json(document);
}

}  // namespace troupe
