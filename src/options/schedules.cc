#include "options/schedules.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"

namespace troupe {
namespace {

// The style that the schedules of the file at `path` name.
template <class Style, size_t N>
Style style_named(const Choice<Style> (&styles)[N], const std::string& name,
                  const std::string& path) {
  const std::optional<Style> style = value_among(styles, name);
  if (!style) throw_failed(fmt::format("{}: there is no style {}.", path, quote_name(name)));
  return *style;
}

// What is left of 1 after the part `r` of the fall of a WSD schedule.
double wsd_coefficient(WsdDecayStyle style, double r) {
  switch (style) {
    case WsdDecayStyle::linear:
      return 1.0 - r;
    case WsdDecayStyle::cosine:
      return 0.5 * (std::cos(std::numbers::pi * r) + 1.0);
    case WsdDecayStyle::exponential:
      return 2.0 * std::pow(0.5, r) - 1.0;
    case WsdDecayStyle::minus_sqrt:
      return 1.0 - std::sqrt(r);
  }
  TROUPE_CHECK(false, "a style of the fall");
}

}  // namespace

double LearningRateSchedule::at(int64_t samples) const {
  const auto n = static_cast<double>(samples);
  if (warmup_samples > 0 && n <= warmup_samples) {
    return init_lr + (max_lr - init_lr) * n / warmup_samples;
  }
  if (style == LrDecayStyle::constant) return max_lr;
  if (samples > decay_samples) return min_lr;
  if (style == LrDecayStyle::inverse_square_root) {
    return std::max(
        min_lr, max_lr * std::sqrt(std::max(warmup_samples, 1.0)) / std::sqrt(std::max(n, 1.0)));
  }
  double coefficient = 1.0;
  if (style == LrDecayStyle::wsd) {
    const int64_t fall_begin = decay_samples - wsd_decay_samples;
    if (samples > fall_begin) {
      coefficient = wsd_coefficient(wsd_style, static_cast<double>(samples - fall_begin) /
                                                   static_cast<double>(wsd_decay_samples));
    }
  } else {
    const double r = (n - warmup_samples) / (static_cast<double>(decay_samples) - warmup_samples);
    coefficient =
        style == LrDecayStyle::linear ? 1.0 - r : 0.5 * (std::cos(std::numbers::pi * r) + 1.0);
  }
  return min_lr + coefficient * (max_lr - min_lr);
}

double WeightDecaySchedule::at(int64_t samples_done) const {
  if (style == IncreaseStyle::constant || samples_done > samples) return end;
  const double r = static_cast<double>(samples_done) / static_cast<double>(samples);
  const double coefficient =
      style == IncreaseStyle::linear ? r : 0.5 * (std::cos(std::numbers::pi * (1.0 - r)) + 1.0);
  return start + coefficient * (end - start);
}

int32_t BatchSizeSchedule::at(int64_t consumed) const {
  const auto after =
      std::upper_bound(stages.begin(), stages.end(), consumed,
                       [](int64_t sample, const Stage& s) { return sample < s.first_sample; });
  return std::prev(after)->batch_size;
}

int32_t BatchSizeSchedule::largest() const {
  int32_t size = 0;
  for (const Stage& stage : stages) size = std::max(size, stage.batch_size);
  return size;
}

int64_t BatchSizeSchedule::steps_between(int64_t from, int64_t to) const {
  int64_t steps = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const int64_t size = stages[i].batch_size;
    const bool last = i + 1 == stages.size();
    if (!last && from >= stages[i + 1].first_sample) continue;
    // Steps that begin within the stage; all of them except those that would end beyond `to`.
    const int64_t begun = last ? std::numeric_limits<int64_t>::max()
                               : (stages[i + 1].first_sample - from + size - 1) / size;
    const int64_t fitting = std::max<int64_t>(0, to - from) / size;
    const int64_t done = std::min(begun, fitting);
    steps += done;
    from += done * size;
    if (done < begun) break;
  }
  return steps;
}

std::string schedule_difference(const Schedules& before, const Schedules& after) {
  const auto differs = [](std::string_view flag, const auto& was, const auto& is) {
    return was == is ? std::string() : fmt::format("{} {} instead of {}", flag, was, is);
  };
  const LearningRateSchedule& a = before.learning_rate;
  const LearningRateSchedule& b = after.learning_rate;
  const WeightDecaySchedule& c = before.weight_decay;
  const WeightDecaySchedule& d = after.weight_decay;
  std::vector<std::string> found = {
      differs("--lr", a.max_lr, b.max_lr),
      differs("--lr-decay-style", name_among(kLrDecayStyles, a.style),
              name_among(kLrDecayStyles, b.style)),
      differs("a warm-up (samples) of", a.warmup_samples, b.warmup_samples)};
  if (before.decoupled_learning_rate || after.decoupled_learning_rate) {
    // Without one these weights have the rates of all others.
    const LearningRateSchedule e = before.decoupled_learning_rate.value_or(a);
    const LearningRateSchedule f = after.decoupled_learning_rate.value_or(b);
    found.push_back(differs("--decoupled-lr", e.max_lr, f.max_lr));
    if (a.style != LrDecayStyle::constant) {
      found.push_back(differs("--decoupled-min-lr", e.min_lr, f.min_lr));
    }
  }
  if (a.warmup_samples > 0) found.push_back(differs("--lr-warmup-init", a.init_lr, b.init_lr));
  if (a.style != LrDecayStyle::constant) {
    found.push_back(differs("--min-lr", a.min_lr, b.min_lr));
    found.push_back(differs(
        "a decay of the learning rate (--lr-decay-iters; if unset, --train-iters) to sample",
        a.decay_samples, b.decay_samples));
  }
  if (a.style == LrDecayStyle::wsd) {
    found.push_back(differs("--lr-wsd-decay-style", name_among(kWsdDecayStyles, a.wsd_style),
                            name_among(kWsdDecayStyles, b.wsd_style)));
    found.push_back(
        differs("a fall at the end (samples) of", a.wsd_decay_samples, b.wsd_decay_samples));
  }
  found.push_back(differs("--weight-decay-incr-style", name_among(kIncreaseStyles, c.style),
                          name_among(kIncreaseStyles, d.style)));
  found.push_back(differs("a weight decay of", c.end, d.end));
  if (c.style != IncreaseStyle::constant) {
    found.push_back(differs("--start-weight-decay", c.start, d.start));
    found.push_back(
        differs("an end of the weight decay's change (samples) at", c.samples, d.samples));
  }
  const auto first =
      std::find_if(found.begin(), found.end(), [](const auto& text) { return !text.empty(); });
  return first == found.end() ? std::string() : *first;
}

std::string to_json(const Schedules& schedules) {
  const LearningRateSchedule& rate = schedules.learning_rate;
  const WeightDecaySchedule& decay = schedules.weight_decay;
  nlohmann::json json = {{"learning_rate",
                          {{"style", name_among(kLrDecayStyles, rate.style)},
                           {"init_lr", rate.init_lr},
                           {"max_lr", rate.max_lr},
                           {"min_lr", rate.min_lr},
                           {"warmup_samples", rate.warmup_samples},
                           {"decay_samples", rate.decay_samples},
                           {"wsd_style", name_among(kWsdDecayStyles, rate.wsd_style)},
                           {"wsd_decay_samples", rate.wsd_decay_samples}}},
                         {"weight_decay",
                          {{"style", name_among(kIncreaseStyles, decay.style)},
                           {"start", decay.start},
                           {"end", decay.end},
                           {"samples", decay.samples}}}};
  if (const auto& decoupled = schedules.decoupled_learning_rate) {
    json["decoupled_learning_rate"] = {{"max_lr", decoupled->max_lr},
                                       {"min_lr", decoupled->min_lr}};
  }
  return json.dump();
}

Schedules parse_schedules(const std::string& text, const std::string& path) {
  const nlohmann::json json = parse_json(text, path, 4);
  Schedules schedules;
  try {
    const nlohmann::json& rate = json.at("learning_rate");
    const nlohmann::json& decay = json.at("weight_decay");
    const auto style = [](const nlohmann::json& of, const char* name) {
      return of.at(name).get<std::string>();
    };
    schedules.learning_rate = {
        .style = style_named(kLrDecayStyles, style(rate, "style"), path),
        .init_lr = rate.at("init_lr").get<double>(),
        .max_lr = rate.at("max_lr").get<double>(),
        .min_lr = rate.at("min_lr").get<double>(),
        .warmup_samples = rate.at("warmup_samples").get<double>(),
        .decay_samples = integer_field(rate, "decay_samples", 1, kMostSamples, path),
        .wsd_style = style_named(kWsdDecayStyles, style(rate, "wsd_style"), path),
        .wsd_decay_samples = integer_field(rate, "wsd_decay_samples", 0, kMostSamples, path)};
    if (json.contains("decoupled_learning_rate")) {
      const nlohmann::json& decoupled = json.at("decoupled_learning_rate");
      schedules.decoupled_learning_rate = schedules.learning_rate;
      schedules.decoupled_learning_rate->max_lr = decoupled.at("max_lr").get<double>();
      schedules.decoupled_learning_rate->min_lr = decoupled.at("min_lr").get<double>();
    }
    schedules.weight_decay = {.style = style_named(kIncreaseStyles, style(decay, "style"), path),
                              .start = decay.at("start").get<double>(),
                              .end = decay.at("end").get<double>(),
                              .samples = integer_field(decay, "samples", 1, kMostSamples, path)};
  } catch (const nlohmann::json::exception& error) {
    throw_failed(fmt::format("{}: the schedules cannot be read ({}).", path, reason_of(error)));
  }
  return schedules;
}

}  // namespace troupe
