#include "options/schedule_options.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "options/read_number.h"
#include "options/refuse_without.h"

namespace troupe {
namespace {

// Of a ramp of the batch size. Products with kMostSamples can be counted in 64 bits.
constexpr int64_t kMostStages = int64_t{1} << 20;

// The words between blanks.
std::vector<std::string_view> split_words(std::string_view text) {
  std::vector<std::string_view> words;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\n"), text.size()));
    if (text.empty()) return words;
    const size_t end = std::min(text.find_first_of(" \t\n"), text.size());
    words.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
}

// "250B" is 250e9; nothing when the text is no such number.
std::optional<int64_t> read_threshold(std::string_view text) {
  constexpr std::string_view kSuffixes = "KMBT";
  int64_t unit = 1;
  if (const size_t suffix = text.empty() ? std::string_view::npos : kSuffixes.find(text.back());
      suffix != std::string_view::npos) {
    for (size_t i = 0; i <= suffix; ++i) unit *= 1000;
    text.remove_suffix(1);
  }
  const double value = read_number<double>(text).value_or(-1) * static_cast<double>(unit);
  if (!(value >= 0)) return std::nullopt;
  // Up to there every whole number is a double.
  if (value > 9.0e15 || value != std::floor(value)) return std::nullopt;
  return static_cast<int64_t>(value);
}

// Stages of the ramp: stage s begins at the first sample c with floor(c n / samples) >= s, where n
// is the number of increments.
BatchSizeSchedule make_ramp(const Options& options) {
  const std::string& text = options.rampup_batch_size;
  const std::vector<std::string_view> words = split_words(text);
  const bool are_three = words.size() == 3;
  const int32_t start = are_three ? read_number<int32_t>(words[0]).value_or(0) : 0;
  const int32_t increment = are_three ? read_number<int32_t>(words[1]).value_or(0) : 0;
  const int64_t samples = are_three ? read_number<int64_t>(words[2]).value_or(0) : 0;
  if (start < 1 || increment < 1 || samples < 1) {
    throw_bad_request(
        fmt::format("--rampup-batch-size takes three whole numbers of at least 1 (first batch "
                    "size, increment, samples), not '{}'.",
                    printable(text)));
  }
  if (!options.global_batch_size) {
    throw_bad_request("--rampup-batch-size needs the size at its end: --global-batch-size N.");
  }
  const int32_t end = *options.global_batch_size;
  if (start > end || (end - start) % increment != 0) {
    throw_bad_request(
        fmt::format("--rampup-batch-size {}: {} plus multiples of {} does not reach "
                    "--global-batch-size {}.",
                    text, start, increment, end));
  }
  const int64_t increments = (end - start) / increment;
  if (samples > kMostSamples || increments > kMostStages) {
    throw_bad_request(fmt::format(
        "--rampup-batch-size {}: {} samples in {} increments are too many; at most {} and {}.",
        text, samples, increments, kMostSamples, kMostStages));
  }
  BatchSizeSchedule schedule;
  for (int64_t stage = 0; stage <= increments; ++stage) {
    const int64_t first = stage == 0 ? 0 : (stage * samples + increments - 1) / increments;
    // With fewer samples than increments, stages begin together and the last one counts.
    if (!schedule.stages.empty() && schedule.stages.back().first_sample == first) {
      schedule.stages.pop_back();
    }
    schedule.stages.push_back({first, static_cast<int32_t>(start + stage * increment)});
  }
  return schedule;
}

BatchSizeSchedule make_steps(const Options& options, int32_t sequence) {
  const std::string& text = options.step_batch_size_schedule;
  BatchSizeSchedule schedule;
  int64_t previous_tokens = -1;
  for (const std::string_view word : split_words(text)) {
    const size_t colon = std::min(word.find(':'), word.size());
    const std::optional<int64_t> tokens = read_threshold(word.substr(0, colon));
    const int32_t size =
        colon < word.size() ? read_number<int32_t>(word.substr(colon + 1)).value_or(0) : 0;
    if (!tokens || size < 1) {
      throw_bad_request(
          fmt::format("--step-batch-size-schedule {}: '{}' is not TOKENS:SIZE, as in 250B:1536.",
                      printable(text), printable(word)));
    }
    if (*tokens <= previous_tokens) {
      throw_bad_request(
          fmt::format("--step-batch-size-schedule {}: the thresholds must rise.", printable(text)));
    }
    previous_tokens = *tokens;
    const int64_t first = *tokens / sequence;
    if (!schedule.stages.empty() && schedule.stages.back().first_sample == first) {
      schedule.stages.pop_back();
    }
    schedule.stages.push_back({first, size});
  }
  if (schedule.stages.empty() || schedule.stages.front().first_sample != 0) {
    throw_bad_request(fmt::format("--step-batch-size-schedule '{}': the first threshold must be 0.",
                                  printable(text)));
  }
  if (options.global_batch_size && *options.global_batch_size != schedule.largest()) {
    throw_bad_request(
        fmt::format("--global-batch-size {} contradicts --step-batch-size-schedule {}, whose "
                    "largest size is {}. Leave --global-batch-size out.",
                    *options.global_batch_size, text, schedule.largest()));
  }
  return schedule;
}

bool has_batch_size_schedule(const Options& options) {
  return !options.rampup_batch_size.empty() || !options.step_batch_size_schedule.empty();
}

// Refuses the flags of one way of counting where the other is used.
void check_lengths(const Options& options) {
  if (options.train_iters && options.train_samples) {
    throw_bad_request("--train-iters and --train-samples exclude each other; give one of them.");
  }
  refuse_without(options.train_tokens && options.gpus.empty(), "train-tokens", "gpus");
  if (options.train_tokens && (options.train_iters || options.train_samples)) {
    throw_bad_request(fmt::format("--train-tokens and {} exclude each other; give one of them.",
                                  options.train_iters ? "--train-iters" : "--train-samples"));
  }
  const int64_t batch = global_batch_size_of(options);
  for (const auto& [flag, iters] :
       {std::pair("--train-iters", options.train_iters),
        std::pair("--lr-decay-iters", options.lr_decay_iters),
        std::pair("--lr-warmup-iters", std::optional(options.lr_warmup_iters)),
        std::pair("--lr-wsd-decay-iters", options.lr_wsd_decay_iters)}) {
    if (iters && *iters > kMostSamples / batch) {
      throw_bad_request(fmt::format(
          "{} {} with steps of {} sequences is more than the {} sequences that a run may take.",
          flag, *iters, batch, kMostSamples));
    }
  }
  for (const auto& [flag, samples] :
       {std::pair("--train-samples", options.train_samples),
        std::pair("--lr-decay-samples", options.lr_decay_samples),
        std::pair("--lr-warmup-samples", std::optional(options.lr_warmup_samples)),
        std::pair("--lr-wsd-decay-samples", options.lr_wsd_decay_samples)}) {
    if (samples && *samples > kMostSamples) {
      throw_bad_request(fmt::format("{} {} is more than the {} sequences that a run may take.",
                                    flag, *samples, kMostSamples));
    }
  }
  const auto refuse = [](std::string_view flag, std::string_view given, std::string_view instead) {
    throw_bad_request(fmt::format("{} does not go with {}. Use {}.", flag, given, instead));
  };
  if (options.train_iters) {
    const std::string_view given = "--train-iters";
    if (options.lr_decay_samples) refuse("--lr-decay-samples", given, "--lr-decay-iters");
    if (options.lr_warmup_samples > 0) refuse("--lr-warmup-samples", given, "--lr-warmup-iters");
    if (options.lr_wsd_decay_samples)
      refuse("--lr-wsd-decay-samples", given, "--lr-wsd-decay-iters");
    if (has_batch_size_schedule(options)) {
      throw_bad_request(
          "A batch size that changes does not go with --train-iters. Use --train-samples.");
    }
  }
  if (options.train_samples) {
    const std::string_view given = "--train-samples";
    if (options.lr_decay_iters) refuse("--lr-decay-iters", given, "--lr-decay-samples");
    if (options.lr_warmup_iters > 0) refuse("--lr-warmup-iters", given, "--lr-warmup-samples");
    if (options.lr_wsd_decay_iters) refuse("--lr-wsd-decay-iters", given, "--lr-wsd-decay-samples");
  }
  if (options.lr_warmup_fraction &&
      (options.lr_warmup_iters > 0 || options.lr_warmup_samples > 0)) {
    throw_bad_request(fmt::format(
        "--lr-warmup-fraction and --lr-warmup-{} both give the warm-up's length; give one of them.",
        options.lr_warmup_iters > 0 ? "iters" : "samples"));
  }
}

void check_rates(const Options& options) {
  if (options.lr && options.min_lr > *options.lr) {
    throw_bad_request(
        fmt::format("--min-lr {} is larger than --lr {}.", options.min_lr, *options.lr));
  }
  if (options.lr && options.lr_warmup_init > *options.lr) {
    throw_bad_request(fmt::format("--lr-warmup-init {} is larger than --lr {}.",
                                  options.lr_warmup_init, *options.lr));
  }
  if (options.decoupled_min_lr && !options.decoupled_lr) {
    throw_bad_request("--decoupled-min-lr needs --decoupled-lr.");
  }
  if (options.decoupled_lr) {
    const double least = options.decoupled_min_lr.value_or(options.min_lr);
    if (least > *options.decoupled_lr) {
      throw_bad_request(fmt::format("{} {} is larger than --decoupled-lr {}.",
                                    options.decoupled_min_lr ? "--decoupled-min-lr" : "--min-lr",
                                    least, *options.decoupled_lr));
    }
  }
  const bool constant = options.weight_decay_incr_style == IncreaseStyle::constant;
  const bool has_ends = options.start_weight_decay || options.end_weight_decay;
  if (constant && has_ends) {
    throw_bad_request(
        "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
        "cosine.");
  }
  if (!constant && (!options.start_weight_decay || !options.end_weight_decay)) {
    throw_bad_request(
        fmt::format("--weight-decay-incr-style {} needs --start-weight-decay and "
                    "--end-weight-decay.",
                    name_among(kIncreaseStyles, options.weight_decay_incr_style)));
  }
  if (!constant && *options.start_weight_decay > *options.end_weight_decay) {
    throw_bad_request(fmt::format("--start-weight-decay {} is larger than --end-weight-decay {}.",
                                  *options.start_weight_decay, *options.end_weight_decay));
  }
}

void check_decay(const Options& options) {
  const bool by_samples = options.train_samples.has_value();
  const std::optional<int64_t> run = by_samples ? options.train_samples : options.train_iters;
  if (!run) return;
  const std::optional<int64_t> given =
      by_samples ? options.lr_decay_samples : options.lr_decay_iters;
  const int64_t decay = given.value_or(*run);
  const int64_t warmup = by_samples ? options.lr_warmup_samples : options.lr_warmup_iters;
  const std::string_view unit = by_samples ? "samples" : "iters";
  if (warmup > 0 && warmup >= decay) {
    throw_bad_request(fmt::format(
        "--lr-warmup-{0} {1} leaves nothing of the {2} {3} of --{4}-{0}; the warm-up must be "
        "shorter.",
        unit, warmup, decay, by_samples ? "samples" : "steps", given ? "lr-decay" : "train"));
  }
  if (options.lr_decay_style != LrDecayStyle::wsd) return;
  const std::optional<int64_t> fall =
      by_samples ? options.lr_wsd_decay_samples : options.lr_wsd_decay_iters;
  if (!fall) {
    throw_bad_request(
        fmt::format("--lr-decay-style WSD needs the length of the fall at the end: "
                    "--lr-wsd-decay-{} N.",
                    unit));
  }
  const double warmup_length = options.lr_warmup_fraction
                                   ? *options.lr_warmup_fraction * static_cast<double>(decay)
                                   : static_cast<double>(warmup);
  if (static_cast<double>(*fall) > static_cast<double>(decay) - warmup_length) {
    throw_bad_request(fmt::format(
        "--lr-wsd-decay-{0} {1} is longer than what the warm-up leaves of the {2} {3} "
        "of --{4}-{0}.",
        unit, *fall, decay, by_samples ? "samples" : "steps", given ? "lr-decay" : "train"));
  }
}

}  // namespace

BatchSizeSchedule make_batch_sizes(const Options& options, int32_t sequence) {
  if (!options.rampup_batch_size.empty() && !options.step_batch_size_schedule.empty()) {
    throw_bad_request(
        "--rampup-batch-size and --step-batch-size-schedule exclude each other; give one of "
        "them.");
  }
  BatchSizeSchedule schedule;
  if (!options.rampup_batch_size.empty()) {
    schedule = make_ramp(options);
  } else if (!options.step_batch_size_schedule.empty()) {
    schedule = make_steps(options, sequence);
  } else {
    schedule.stages = {{0, global_batch_size_of(options)}};
  }
  if (options.decrease_batch_size_if_needed && has_batch_size_schedule(options)) {
    throw_bad_request(
        "--decrease-batch-size-if-needed goes with one global batch size; leave it out beside "
        "--rampup-batch-size and --step-batch-size-schedule.");
  }
  for (const BatchSizeSchedule::Stage& stage : schedule.stages) {
    const int32_t replicas = data_parallel_size_of(options);
    const int64_t unit = int64_t{options.micro_batch_size} * replicas;
    if (stage.batch_size % unit == 0) continue;
    const std::string_view flag = !options.rampup_batch_size.empty() ? "--rampup-batch-size: size"
                                  : has_batch_size_schedule(options)
                                      ? "--step-batch-size-schedule: size"
                                      : "--global-batch-size";
    if (replicas == 1) {
      throw_bad_request(fmt::format("{} {} is not a multiple of --micro-batch-size {}.", flag,
                                    stage.batch_size, options.micro_batch_size));
    }
    const int64_t below = stage.batch_size / unit * unit;
    throw_bad_request(fmt::format(
        "{} {}: it must be a multiple of --micro-batch-size {} x DP {} = {}. Nearest: {}{}.", flag,
        stage.batch_size, options.micro_batch_size, replicas, unit,
        below > 0 ? fmt::format("{} or ", below) : "", below + unit));
  }
  return schedule;
}

Schedules make_schedules(const Options& options) {
  // Steps have one size where lengths are in steps (check_schedules): that which was asked for,
  // also where --decrease-batch-size-if-needed makes it smaller, so that the schedules stay the
  // same when the number of ranks changes.
  const int64_t unit =
      options.train_samples ? 1 : options.global_batch_size.value_or(global_batch_size_of(options));
  const int64_t run = options.train_samples ? *options.train_samples : *options.train_iters;
  const bool by_samples = options.train_samples.has_value();
  const auto pick = [&](const std::optional<int64_t>& samples,
                        const std::optional<int64_t>& iters) {
    return by_samples ? samples : iters;
  };
  Schedules schedules;
  LearningRateSchedule& rate = schedules.learning_rate;
  rate.style = options.lr_decay_style;
  rate.init_lr = options.lr_warmup_init;
  rate.max_lr = *options.lr;
  rate.min_lr = options.min_lr;
  rate.decay_samples = pick(options.lr_decay_samples, options.lr_decay_iters).value_or(run) * unit;
  rate.warmup_samples =
      options.lr_warmup_fraction
          ? *options.lr_warmup_fraction * static_cast<double>(rate.decay_samples)
          : static_cast<double>((by_samples ? options.lr_warmup_samples : options.lr_warmup_iters) *
                                unit);
  if (rate.style == LrDecayStyle::wsd) {
    rate.wsd_style = options.lr_wsd_decay_style;
    rate.wsd_decay_samples =
        pick(options.lr_wsd_decay_samples, options.lr_wsd_decay_iters).value_or(0) * unit;
  }
  if (options.decoupled_lr) {
    schedules.decoupled_learning_rate = rate;
    schedules.decoupled_learning_rate->max_lr = *options.decoupled_lr;
    schedules.decoupled_learning_rate->min_lr = options.decoupled_min_lr.value_or(options.min_lr);
  }
  WeightDecaySchedule& decay = schedules.weight_decay;
  decay.style = options.weight_decay_incr_style;
  decay.start = options.start_weight_decay.value_or(options.weight_decay);
  decay.end = options.end_weight_decay.value_or(options.weight_decay);
  decay.samples = run * unit;
  return schedules;
}

void check_schedules(const Options& options) {
  check_lengths(options);
  check_rates(options);
  check_decay(options);
  // The length of a sequence only moves thresholds.
  make_batch_sizes(options, 1);
}

}  // namespace troupe
