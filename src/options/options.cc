#include "options/options.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

template <class T>
struct Unwrapped {
  using Type = T;
};
template <class T>
struct Unwrapped<std::optional<T>> {
  using Type = T;
};

// Calls visitor(value) with the option's member of `options`, or with its ChoiceMember.
template <class OptionsType, class Visitor>
decltype(auto) visit_value(OptionsType& options, const OptionSpec& spec, const Visitor& visitor) {
  return std::visit(
      [&](auto member) -> decltype(auto) {
        if constexpr (std::is_same_v<decltype(member), ChoiceMember>) {
          return visitor(std::as_const(member));
        } else {
          return visitor(options.*member);
        }
      },
      spec.member);
}

template <class T>
bool is_within(const OptionRange& range, T value) {
  const double x = static_cast<double>(value);
  return (range.above_min ? x > range.min : x >= range.min) &&
         (range.below_max ? x < range.max : x <= range.max);
}

[[noreturn]] void refuse(const OptionSpec& spec, std::string_view text, std::string_view what) {
  throw_bad_request(fmt::format("{} takes {}, not '{}'.", flag_of(spec), what, printable(text)));
}

template <class T>
T parse_number(const OptionSpec& spec, std::string_view text) {
  const std::string range = range_text(spec);
  const std::string wanted = fmt::format("a {}number{}{}", std::is_integral_v<T> ? "whole " : "",
                                         range.empty() ? "" : ", ", range);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) {
    throw_bad_request(
        fmt::format("{} {}: the number is out of range.", flag_of(spec), printable(text)));
  }
  if (error != std::errc() || end != text.data() + text.size() || !is_within(spec.range, value)) {
    refuse(spec, text, wanted);
  }
  return value;
}

bool parse_bool(const OptionSpec& spec, std::string_view text) {
  if (text == "true") return true;
  if (text != "false") refuse(spec, text, "no value, or =true or =false");
  return false;
}

std::string join_choices(std::span<const std::string_view> choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) text += i + 1 == choices.size() ? " or " : ", ";
    text += choices[i];
  }
  return text;
}

nlohmann::ordered_json json_of(const Options& options, const OptionSpec& spec) {
  return visit_value(options, spec, [&](const auto& value) -> nlohmann::ordered_json {
    using Value = std::decay_t<decltype(value)>;
    using Element = typename Unwrapped<Value>::Type;
    if constexpr (std::is_same_v<Value, ChoiceMember>) {
      const std::vector<std::string_view> names = value.chosen(options);
      if (value.is_list) return names;
      return names.empty() ? "" : names.front();
    } else if constexpr (std::is_same_v<Value, Element>) {
      return value;
    } else {
      return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
    }
  });
}

// The text that set_option takes for one JSON value, or nothing when the kind of value is wrong.
std::optional<std::string> text_of(const nlohmann::json& value, bool wants_string) {
  if (value.is_string() != wants_string) return std::nullopt;
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean() || value.is_number()) return value.dump();
  return std::nullopt;
}

void set_from_json(Options& options, const OptionSpec& spec, const nlohmann::json& value) {
  const auto set = [&](const nlohmann::json& item, bool wants_string) {
    const std::optional<std::string> text = text_of(item, wants_string);
    if (!text) refuse(spec, item.dump(), "another kind of value");
    // What is empty was unset when it was saved.
    if (wants_string && text->empty()) return;
    set_option(options, spec, *text);
  };
  visit_value(options, spec, [&](auto& member) {
    using Value = std::decay_t<decltype(member)>;
    using Element = typename Unwrapped<Value>::Type;
    const auto set_list = [&] {
      if (!value.is_array()) refuse(spec, value.dump(), "an array");
      for (const nlohmann::json& item : value) set(item, true);
    };
    if constexpr (std::is_same_v<Value, ChoiceMember>) {
      member.clear(options);
      if (member.is_list) {
        set_list();
      } else {
        set(value, true);
      }
    } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
      member.clear();
      set_list();
    } else if constexpr (std::is_same_v<Value, Element>) {
      if constexpr (std::is_same_v<Value, std::string>) member.clear();
      set(value, std::is_same_v<Value, std::string>);
    } else {
      member.reset();
      if (!value.is_null()) set(value, false);
    }
  });
}

}  // namespace

const CommandInfo& info_of(Command command) {
  for (const CommandInfo& info : command_table()) {
    if (info.command == command) return info;
  }
  TROUPE_CHECK(false, "a command is missing from the table");
}

const OptionSpec* find_option(std::string_view name) {
  const auto same_letter = [](char a, char b) {
    return (a == '_' ? '-' : a) == (b == '_' ? '-' : b);
  };
  const auto is_named = [&](std::string_view known) {
    return std::equal(known.begin(), known.end(), name.begin(), name.end(), same_letter);
  };
  for (const OptionSpec& spec : option_table()) {
    if (any_name(spec, is_named)) return &spec;
  }
  return nullptr;
}

bool exclude_each_other(const OptionSpec& first, const OptionSpec& second) {
  const auto belongs = [](const OptionSpec& spec, const OptionSpec& group) {
    const std::string names = fmt::format(" {} {} ", group.name, group.instead);
    return names.find(fmt::format(" {} ", spec.name)) != std::string::npos;
  };
  for (const OptionSpec& group : option_table()) {
    if (group.instead.empty() || &first == &second) continue;
    if (belongs(first, group) && belongs(second, group)) return true;
  }
  return false;
}

bool needs_value(const OptionSpec& spec) {
  return spec.shorthand.empty() && !std::holds_alternative<bool Options::*>(spec.member) &&
         !std::holds_alternative<std::optional<bool> Options::*>(spec.member);
}

bool is_list(const OptionSpec& spec) {
  const auto* choice = std::get_if<ChoiceMember>(&spec.member);
  if (choice != nullptr) return choice->is_list;
  return std::holds_alternative<std::vector<std::string> Options::*>(spec.member);
}

std::span<const std::string_view> choices_of(const OptionSpec& spec) {
  if (!spec.shorthand.empty()) return {};
  const auto* choice = std::get_if<ChoiceMember>(&spec.member);
  return choice != nullptr ? choice->names : spec.choices;
}

bool was_given(const Options& options, std::string_view name) {
  return std::find(options.given.begin(), options.given.end(), name) != options.given.end();
}

std::string flag_of(const OptionSpec& spec) {
  return spec.positional ? std::string(spec.name) : fmt::format("--{}", spec.name);
}

void set_option(Options& options, const OptionSpec& spec, std::string_view text) {
  if (!spec.shorthand.empty()) {
    if (!parse_bool(spec, text)) refuse(spec, text, "no value");
    text = spec.shorthand;
  }
  const bool unsets = !spec.unset_word.empty() && text == spec.unset_word;
  const std::span<const std::string_view> choices = choices_of(spec);
  if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
    refuse(spec, text, join_choices(choices));
  }
  visit_value(options, spec, [&](auto& member) {
    using Value = std::decay_t<decltype(member)>;
    using Element = typename Unwrapped<Value>::Type;
    if constexpr (std::is_same_v<Value, ChoiceMember>) {
      member.choose(options, text);
    } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
      if (text.empty()) refuse(spec, text, "a value");
      member.emplace_back(text);
    } else if constexpr (std::is_same_v<Element, std::string>) {
      member = text;
    } else if constexpr (std::is_same_v<Element, bool>) {
      member = parse_bool(spec, text);
    } else {
      if constexpr (!std::is_same_v<Value, Element>) {
        if (unsets) return member.reset();
      }
      member = parse_number<Element>(spec, text);
    }
  });
}

std::string value_text(const Options& options, const OptionSpec& spec) {
  return visit_value(options, spec, [&](const auto& value) -> std::string {
    using Value = std::decay_t<decltype(value)>;
    using Element = typename Unwrapped<Value>::Type;
    if constexpr (std::is_same_v<Value, ChoiceMember>) {
      return fmt::format("{}", fmt::join(value.chosen(options), " "));
    } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
      return fmt::format("{}", fmt::join(value, " "));
    } else if constexpr (std::is_same_v<Value, Element>) {
      return fmt::format("{}", value);
    } else {
      return value ? fmt::format("{}", *value) : std::string();
    }
  });
}

std::string value_text(const Options& options, std::string_view name) {
  const OptionSpec* spec = find_option(name);
  TROUPE_CHECK(spec != nullptr, fmt::format("there is no option {}", name));
  return value_text(options, *spec);
}

std::string range_text(const OptionSpec& spec) {
  if (!choices_of(spec).empty()) return join_choices(choices_of(spec));
  const OptionRange& range = spec.range;
  const bool has_min = range.min > OptionRange{}.min;
  const bool has_max = range.max < OptionRange{}.max;
  if (has_min && has_max && !range.above_min && !range.below_max) {
    return fmt::format("{} to {}", range.min, range.max);
  }
  std::string text;
  if (has_min) text = fmt::format("{} {}", range.above_min ? "above" : "at least", range.min);
  if (has_min && has_max) text += " and ";
  if (has_max) text += fmt::format("{} {}", range.below_max ? "below" : "at most", range.max);
  if (!spec.unset_word.empty()) text += fmt::format(", or {}", spec.unset_word);
  return text;
}

bool describes_shape(const Options& options) {
  return options.num_layers || options.hidden_size || options.num_attention_heads;
}

std::string to_json(const Options& options) {
  nlohmann::ordered_json json;
  json["command"] = info_of(options.command).name;
  for (const OptionSpec& spec : option_table()) {
    if (takes(options.command, spec) && spec.shorthand.empty()) {
      json[std::string(spec.name)] = json_of(options, spec);
    }
  }
  // A path need not be valid UTF-8, JSON must be.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void from_json(Options& options, std::string_view text, const std::string& path) {
  const nlohmann::json json = parse_json(text, path, 4);
  if (!json.is_object()) throw_failed(fmt::format("{}: the options are not a JSON object.", path));
  try {
    for (const auto& [name, value] : json.items()) {
      if (name == "command") {
        const CommandInfo* found = nullptr;
        for (const CommandInfo& info : command_table()) {
          if (value == info.name) found = &info;
        }
        if (found == nullptr) throw_bad_request("no such command: " + printable(value.dump()));
        options.command = found->command;
        continue;
      }
      const OptionSpec* spec = find_option(name);
      if (spec == nullptr || !spec->shorthand.empty()) {
        throw_bad_request(fmt::format("no such option: {}", quote_name(name)));
      }
      set_from_json(options, *spec, value);
    }
  } catch (const UserError& error) {
    throw_failed(fmt::format("{}: the saved options cannot be read: {}", path, error.what()));
  }
}

std::string to_toml(const Options& options) {
  std::string text = fmt::format(
      "# Options of troupe {0}. `troupe {0} --config FILE` reads this file; flags on the command "
      "line win.\n",
      info_of(options.command).name);
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (!takes(options.command, spec) || !spec.shorthand.empty() || spec.positional) continue;
    if (spec.member == OptionMember(&Options::config)) continue;
    const nlohmann::ordered_json value = json_of(options, spec);
    // What is unset has no value to write.
    if (value_text(options, spec).empty()) continue;
    if (spec.group != group) {
      group = spec.group;
      text += fmt::format("\n# {}\n", group);
    }
    // Numbers, strings and lists of strings look the same in both languages.
    text += fmt::format("{} = {}\n", spec.name,
                        value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return text;
}

std::string given_to_toml(const Options& options) {
  std::string text;
  for (const OptionSpec& spec : option_table()) {
    if (!was_given(options, spec.name) || spec.positional) continue;
    const nlohmann::ordered_json value =
        spec.shorthand.empty() ? json_of(options, spec) : nlohmann::ordered_json(true);
    text += fmt::format("{} = {}\n", spec.name,
                        value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return text;
}

std::vector<OptionDifference> differences(const Options& before, const Options& after) {
  std::vector<OptionDifference> result;
  for (const OptionSpec& spec : option_table()) {
    if (!takes(after.command, spec) || !spec.shorthand.empty()) continue;
    // Not by text: a list of two values may read like another of one.
    if (json_of(before, spec) == json_of(after, spec)) continue;
    result.push_back({&spec, value_text(before, spec), value_text(after, spec)});
  }
  return result;
}

std::string describe(const Options& options) {
  const Options defaults;
  size_t width = 0;
  for (const OptionSpec& spec : option_table()) {
    if (takes(options.command, spec)) width = std::max(width, flag_of(spec).size());
  }
  std::string text = fmt::format("Options of troupe {} (* differs from the default)\n",
                                 info_of(options.command).name);
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (!takes(options.command, spec) || !spec.shorthand.empty()) continue;
    if (spec.group != group) {
      group = spec.group;
      text += fmt::format("  {}\n", group);
    }
    const bool differs = json_of(options, spec) != json_of(defaults, spec);
    std::string value = value_text(options, spec);
    if (value.empty()) value = spec.unset.empty() ? "-" : fmt::format("- ({})", spec.unset);
    text += fmt::format("  {} {:<{}}  {}\n", differs ? '*' : ' ', flag_of(spec), width, value);
  }
  return text;
}

std::vector<std::string> changed_flags(const Options& options) {
  const Options defaults;
  std::vector<std::string> flags;
  for (const OptionSpec& spec : option_table()) {
    if (!takes(options.command, spec) || !spec.shorthand.empty()) continue;
    if (json_of(options, spec) == json_of(defaults, spec)) continue;
    const std::string value = value_text(options, spec);
    if (needs_value(spec)) {
      flags.push_back(fmt::format("{} {}", flag_of(spec), printable(value)));
    } else {
      flags.push_back(flag_of(spec) + (value == "true" ? "" : "=" + value));
    }
  }
  return flags;
}

int32_t data_parallel_size_of(const Options& options) {
  int32_t size = options.ranks;
  for (const int32_t other : {options.tensor_model_parallel_size, options.context_parallel_size,
                              options.pipeline_model_parallel_size}) {
    size = std::max(1, size / std::max(1, other));
  }
  return size;
}

int32_t global_batch_size_of(const Options& options) {
  const int64_t unit = int64_t{options.micro_batch_size} * data_parallel_size_of(options);
  const int32_t size = options.global_batch_size.value_or(static_cast<int32_t>(unit));
  // What is too small to be rounded down is refused with the rest (make_batch_sizes).
  if (!options.decrease_batch_size_if_needed || size < unit) return size;
  return static_cast<int32_t>(size - size % unit);
}

}  // namespace troupe
