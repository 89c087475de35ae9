#include "cli/plan_search.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "base/units.h"
#include "cli/result_file.h"
#include "data/json_text.h"
#include "options/cluster_options.h"
#include "options/device_options.h"
#include "options/model_options.h"
#include "train/interrupt.h"
#include "train/layout_search.h"
#include "train/memory_remedies.h"
#include "train/terminal.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

constexpr ResultKind kFound = {.flag = "--search-output",
                               .heading = "# Found by `troupe plan --search`",
                               .name = "result of a search"};

// What a search must be told, which no layout may change.
void require_enough(const Options& options) {
  if (options.gpus.empty()) {
    throw_bad_request(
        "--search looks for the best layout on the GPUs of --gpus, which is missing. Add --gpus "
        "64xh100, for example.");
  }
  if (!options.global_batch_size) {
    throw_bad_request(
        fmt::format("--search compares layouts at one global batch size, which is missing. Add "
                    "--global-batch-size N: {}, for example.",
                    8 * options.ranks));
  }
}

std::string text_of(RecomputeChoice recompute) {
  switch (recompute) {
    case RecomputeChoice::none:
      return "none";
    case RecomputeChoice::cheap:
      return "cheap";
    case RecomputeChoice::full:
      return "full";
  }
  return "?";
}

// What a column has no room for: sharding, dispatcher, overlap, schedule.
std::string details_of(const LayoutChoice& choice) {
  std::vector<std::string> parts;
  if (choice.sharding == ShardingChoice::optimizer) parts.emplace_back("optimizer sharded");
  if (choice.sharding == ShardingChoice::all) parts.emplace_back("FSDP");
  if (choice.ep * choice.etp > 1) parts.emplace_back(name_of(choice.dispatcher));
  if (choice.schedule != PipelineSchedule::one_f_one_b) {
    parts.emplace_back(name_of(choice.schedule));
  }
  if (choice.overlap_gradients) parts.emplace_back("gradients overlap");
  if (choice.overlap_experts) parts.emplace_back("experts' exchange overlaps");
  if (choice.delay_weights) parts.emplace_back("weight gradients delayed");
  if (choice.overlap_shared_expert) parts.emplace_back("shared expert overlaps");
  return fmt::format("{}", fmt::join(parts, ", "));
}

double percent_of_memory(const LayoutTrial& trial, const GpuCluster& cluster) {
  return 100 * static_cast<double>(trial.bytes) / static_cast<double>(cluster.model.memory_bytes);
}

// In a column of a table.
std::string_view short_limit_of(const StepTime& time) {
  const std::string_view limit = limit_of(time);
  return limit == "memory bandwidth" ? "bandwidth" : limit;
}

std::string table_of(const LayoutSearch& search, const GpuCluster& cluster) {
  std::string text = fmt::format("{:>2} {:<26} {:>3} {:<9} {:>6} {:>8} {:>7} {}\n", "", "layout",
                                 "mbs", "recompute", "memory", "tokens/s", "TFLOP/s", "limit");
  for (size_t i = 0; i < search.best.size(); ++i) {
    const auto& [choice, trial] = search.best[i];
    text += fmt::format("{:>2} {:<26} {:>3} {:<9} {:>4.0f} % {:>8.0f} {:>7.0f} {}\n", i + 1,
                        text_of_sizes(choice), choice.micro_batch, text_of(choice.recompute),
                        percent_of_memory(trial, cluster), trial.tokens_per_s,
                        trial.flops_per_s / 1e12, short_limit_of(trial.time));
    if (const std::string details = details_of(choice); !details.empty()) {
      text += wrap_text("   " + details, kDefaultColumns, 3) + "\n";
    }
  }
  return text;
}

std::string outcome_of(const Alternative& alternative, const FoundLayout& winner,
                       const GpuCluster& cluster) {
  if (!alternative.trial) {
    return fmt::format("cannot be: {}", alternative.refusal);
  }
  const LayoutTrial& trial = *alternative.trial;
  if (!trial.fits) {
    return fmt::format("does not fit: at least {} of {}", format_bytes(trial.bytes),
                       format_bytes(cluster.model.memory_bytes));
  }
  const double change = trial.tokens_per_s / winner.trial.tokens_per_s - 1;
  return fmt::format("{:.0f} tokens/s, {:+.0f} %; limit: {}", trial.tokens_per_s, 100 * change,
                     limit_of(trial.time));
}

std::string alternatives_text(const LayoutSearch& search, const GpuCluster& cluster) {
  if (search.alternatives.empty()) return {};
  std::string text = "\nInstead of the first, all else the same\n";
  for (const Alternative& alternative : search.alternatives) {
    const std::string line =
        fmt::format("  {} ({}): {}", alternative.name, text_of_sizes(alternative.choice),
                    outcome_of(alternative, search.best.front(), cluster));
    text += wrap_text(line, kDefaultColumns, 4) + "\n";
  }
  return text;
}

std::string counts_text(const LayoutSearch& search) {
  return wrap_text(
      fmt::format("{} layouts{}: {} refused by model or flags, {} do not fit, {} planned",
                  search.choices, search.interrupted ? ", interrupted" : "", search.refused,
                  search.too_large, search.planned),
      kDefaultColumns, 2);
}

std::string flags_text(const LayoutSpace& space, const LayoutChoice& choice) {
  std::vector<std::string> words;
  std::string_view before;
  for (const auto& [name, value] : space.flags_of(choice)) {
    if (name == before) {
      words.back() += " " + value;
    } else {
      const std::string quoted =
          value.find_first_of("|*(") != std::string::npos ? fmt::format("'{}'", value) : value;
      words.push_back(value == "true" ? "--" + name : fmt::format("--{} {}", name, quoted));
    }
    before = name;
  }
  return wrap_words(words, kDefaultColumns, 2, 2);
}

std::string nothing_fits(const LayoutSearch& search, const LayoutSpace& space,
                         const GpuCluster& cluster) {
  std::string text = "Nothing fits. ";
  if (!search.nearest) {
    return text +
           "No layout is possible with these flags: leave layout flags out, or choose another "
           "--global-batch-size.\n";
  }
  const auto& [choice, trial] = *search.nearest;
  text += fmt::format("The nearest, {}, takes {} of {}:\n\n", text_of_sizes(choice),
                      format_bytes(trial.bytes), format_bytes(cluster.model.memory_bytes));
  text += flags_text(space, choice) + "\n\n";
  return text + describe_remedies(space.apply(choice), /*rank=*/0, trial.bytes,
                                  cluster.model.memory_bytes);
}

ordered_json choice_json(const LayoutSpace& space, const LayoutChoice& choice) {
  ordered_json flags = ordered_json::object();
  for (const auto& [name, value] : space.flags_of(choice)) {
    ordered_json& entry = flags[name];
    entry = entry.is_null() ? value : entry.get<std::string>() + " " + value;
  }
  return flags;
}

ordered_json trial_json(const LayoutTrial& trial) {
  ordered_json document = {{"fits", trial.fits}, {"bytes", trial.bytes}};
  if (trial.tokens_per_s == 0) return document;
  document["tokens_per_s_per_gpu"] = trial.tokens_per_s;
  document["model_flops_per_s_per_gpu"] = trial.flops_per_s;
  document["seconds"] = trial.time.seconds;
  document["limit"] = limit_of(trial.time);
  if (trial.expert_room > 0) document["expert_room"] = trial.expert_room;
  return document;
}

std::string make_json(const LayoutSearch& search, const LayoutSpace& space,
                      const GpuCluster& cluster) {
  ordered_json document = {{"fits", !search.best.empty()},
                           {"available_bytes", cluster.model.memory_bytes},
                           {"interrupted", search.interrupted},
                           {"layouts", search.choices},
                           {"refused", search.refused},
                           {"too_large", search.too_large},
                           {"planned", search.planned},
                           {"best", ordered_json::array()},
                           {"alternatives", ordered_json::array()}};
  for (const auto& [choice, trial] : search.best) {
    ordered_json entry = trial_json(trial);
    entry["flags"] = choice_json(space, choice);
    document["best"].push_back(std::move(entry));
  }
  for (const Alternative& alternative : search.alternatives) {
    ordered_json entry = {{"name", alternative.name},
                          {"flags", choice_json(space, alternative.choice)}};
    if (alternative.trial) {
      entry.update(trial_json(*alternative.trial));
    } else {
      entry["refusal"] = alternative.refusal;
    }
    document["alternatives"].push_back(std::move(entry));
  }
  if (search.nearest) {
    ordered_json entry = trial_json(search.nearest->trial);
    entry["flags"] = choice_json(space, search.nearest->choice);
    document["nearest"] = std::move(entry);
  }
  return printed_json(document);
}

}  // namespace

ExitStatus run_plan_search(const Options& options) {
  require_enough(options);
  check_result_file(kFound, options.search_output);
  install_interrupt_handlers(/*quiet=*/true);
  const ModelConfig config = load_model_config(options);
  const GpuCluster cluster = *gpu_cluster_of(options, config);
  const LayoutSpace space(options, config, cluster.model.gpus_per_nvlink);
  LayoutSearch search;
  {
    std::optional<WorkProgress> progress;
    progress.emplace(options.quiet, "estimating", "ways to spread a layer");
    bool is_planning = false;
    const auto planning = [&](uint64_t done, uint64_t total) {
      // The few that are planned take most of the time.
      if (!is_planning) progress.emplace(options.quiet, "planning", "layouts");
      progress->show(done, total, /*at_once=*/!is_planning);
      is_planning = true;
    };
    search = search_layouts(space, config, cluster, options.search_top,
                            device_spec_of(options).thread_count(),
                            {.estimating = progress->report(), .planning = planning});
  }
  if (!options.search_output.empty() && !search.best.empty()) {
    const FoundLayout& winner = search.best.front();
    write_result_file(
        options.search_output,
        fmt::format("{} for --gpus {}: {} ranks.\n{}", kFound.heading, printable(options.gpus),
                    options.ranks, space.to_file(winner.choice, winner.trial.expert_room)));
  }
  if (options.json) {
    fmt::print("{}", make_json(search, space, cluster));
  } else if (search.best.empty()) {
    if (search.interrupted) {
      fmt::print("{}\nNo layout has been planned yet.\n", counts_text(search));
    } else {
      fmt::print("{}\n{}", counts_text(search), nothing_fits(search, space, cluster));
    }
  } else {
    fmt::print("{}\n\n{}{}\nThe first:\n{}\n", counts_text(search), table_of(search, cluster),
               alternatives_text(search, cluster), flags_text(space, search.best.front().choice));
    if (!options.search_output.empty()) {
      fmt::print("It is written to {}.\n", printable(options.search_output));
    }
  }
  if (search.interrupted) return ExitStatus::interrupted;
  return search.best.empty() ? ExitStatus::does_not_fit : ExitStatus::done;
}

}  // namespace troupe
