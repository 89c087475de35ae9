#include "options/changed_options.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fmt/format.h>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

namespace troupe {
namespace {

using nlohmann::json;

// Options of the groups below that change no number of a step, or are compared and reported by
// themselves: data by contents, lengths with the order of the data, the model and the tokenizer by
// what they are.
constexpr std::array kReportedElsewhere = std::to_array<std::string_view>({
    "data-path",
    "data-args-path",
    "train-data-path",
    "test-data-path",
    "per-split-data-args-path",
    "multiple-validation-sets",
    "eval-micro-batch-size",
    "eval-global-batch-size",
    "split",
    "seq-length",
    "seed",
    "tokenizer-type",
    "tokenizer-model",
    "compute-dtype",
    "train-iters",
    "train-samples",
    "override-opt_param-scheduler",
    "use-checkpoint-opt_param-scheduler",
    "max-skipped-steps",
    "keep-partial-validation-sample",
    "warn-load-imbalance",
    "warn-dead-experts",
    "warn-router-entropy",
    "moe-expert-row-multiple",
    "moe-flex-dispatcher-num-sms",
});
// With --use-checkpoint-opt_param-scheduler the checkpoint's hold.
constexpr std::array kSchedules = std::to_array<std::string_view>({
    "lr",
    "min-lr",
    "lr-decay-style",
    "lr-decay-iters",
    "lr-decay-samples",
    "lr-warmup-init",
    "lr-warmup-fraction",
    "lr-warmup-iters",
    "lr-warmup-samples",
    "lr-wsd-decay-style",
    "lr-wsd-decay-iters",
    "lr-wsd-decay-samples",
    "weight-decay",
    "start-weight-decay",
    "end-weight-decay",
    "weight-decay-incr-style",
});
// They stand in groups that change no number, or with the model, and decide what is computed.
constexpr std::array kDecideNumbers = std::to_array<std::string_view>({
    "main-grads-dtype",
    "grad-reduce-in-bf16",
    "exp-avg-dtype",
    "exp-avg-sq-dtype",
    "moe-router-ignore-padding",
    "moe-dispatch-fwd-dtype",
    "moe-combine-bwd-dtype",
    "activation-func-fp8-input-store",
    "fp4-format",
    "fp4-recipe",
    "fp8-format",
    "fp8-recipe",
    "fp8-modules",
    "fp8-amax-history-len",
    "fp8-amax-compute-algo",
    "fp8-margin",
    "no-fp8-wgrad",
    "first-last-layers-bf16",
    "num-layers-at-start-in-bf16",
    "num-layers-at-end-in-bf16",
});

template <size_t N>
bool is_among(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What the change of an option of this group does, if it is not among the names above.
enum class Effect : uint8_t { none, rounding, another_run };

Effect effect_of(const OptionSpec& spec, const Options& now) {
  if (is_among(spec.name, kDecideNumbers)) return Effect::another_run;
  if (is_among(spec.name, kReportedElsewhere)) return Effect::none;
  if (now.use_checkpoint_opt_param_scheduler && is_among(spec.name, kSchedules)) {
    return Effect::none;
  }
  if (spec.group == "Training" || spec.group == "Data") return Effect::another_run;
  if (spec.group == "Parallel layout" || spec.name == "ranks" || spec.name == "device" ||
      spec.name == "loss-chunk-tokens") {
    return Effect::rounding;
  }
  return Effect::none;  // the model's fields are compared as such
}

std::string text_of(const json& value) {
  if (value.is_null()) return "not given";
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    return text.empty() ? "not given" : text;
  }
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

std::vector<std::string> changed_option_lines(const std::string& options_json, const Options& now) {
  const json before = json::parse(options_json, nullptr, /*allow_exceptions=*/false);
  const json after = json::parse(to_json(now));
  Options plain;
  plain.command = now.command;
  const json defaults = json::parse(to_json(plain));
  std::vector<std::string> warnings;
  std::vector<std::string> notes;
  if (!before.is_object() || before.value("command", "") != "train") return warnings;
  for (const OptionSpec& spec : option_table()) {
    const std::string name(spec.name);
    const Effect effect = effect_of(spec, now);
    if (effect == Effect::none || !after.contains(name)) continue;
    // An older version that did not have the option did what its default says.
    const json& was = before.contains(name) ? before.at(name) : defaults.at(name);
    if (was == after.at(name)) continue;
    const std::string change = fmt::format("changed since the checkpoint: --{} {} -> {}", name,
                                           text_of(was), text_of(after.at(name)));
    if (effect == Effect::another_run) {
      warnings.push_back("Warning: " + change);
    } else {
      notes.push_back(change + " (other rounding at most)");
    }
  }
  std::move(notes.begin(), notes.end(), std::back_inserter(warnings));
  return warnings;
}

}  // namespace troupe
