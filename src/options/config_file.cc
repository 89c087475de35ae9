#include "options/config_file.h"

#include <algorithm>
#include <fmt/format.h>
#include <sstream>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "options/foreign_flags.h"
#include "options/suggest.h"
#include "options/toml_file.h"

namespace troupe {
namespace {

[[noreturn]] void refuse_name(const std::string& name) {
  std::vector<std::string_view> candidates;
  for (const OptionSpec& spec : option_table()) {
    if (!spec.positional) candidates.push_back(spec.name);
  }
  const std::string_view guess = closest(name, candidates);
  throw_bad_request(fmt::format(
      "there is no option {}.{}", quote_name(name),
      guess.empty() ? " docs/options.md lists them." : fmt::format(" Did you mean {}?", guess)));
}

// The values of a flag of Megatron as the command line would have them.
std::string text_of(const ForeignFlag& flag, const toml::node& node) {
  if (flag.values == ForeignValues::none) {
    const auto* set = node.as_boolean();
    if (set != nullptr && set->get()) return {};
    throw_bad_request(fmt::format("{} takes no value but true.", flag.name));
  }
  const auto word = [&](const toml::node& item) {
    if (const auto text = item.value<std::string>()) return *text;
    if (const auto number = item.value<double>()) return fmt::format("{}", *number);
    throw_bad_request(fmt::format("{} takes another kind of value.", flag.name));
  };
  const toml::array* array = node.as_array();
  if (array == nullptr) return word(node);
  if (flag.values != ForeignValues::many) {
    throw_bad_request(fmt::format("{} takes one value.", flag.name));
  }
  std::vector<std::string> words;
  for (const toml::node& item : *array) words.push_back(word(item));
  return fmt::format("{}", fmt::join(words, " "));
}

// A value of any kind.
std::string text_of(const toml::node& node) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return fmt::format("{}", number->get());
  if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
  if (const auto* flag = node.as_boolean()) return fmt::format("{}", flag->get());
  std::vector<std::string> texts;
  if (const auto* array = node.as_array()) {
    for (const toml::node& item : *array) texts.push_back(text_of(item));
  }
  return fmt::format("{}", fmt::join(texts, " "));
}

// One value as the command line would have it.
std::string text_of(const OptionSpec& spec, const toml::node& node) {
  const bool wants_string = std::holds_alternative<std::string Options::*>(spec.member) ||
                            std::holds_alternative<ChoiceMember>(spec.member) || is_list(spec);
  if (const auto* text = node.as_string()) {
    const bool unsets = !spec.unset_word.empty() && text->get() == spec.unset_word;
    if ((wants_string && spec.shorthand.empty()) || unsets) return text->get();
    throw_bad_request(fmt::format("{} takes no text in quotes.", spec.name));
  }
  std::string text = node.is_value() ? text_of(node) : std::string();
  if (text.empty()) throw_bad_request(fmt::format("{} takes another kind of value.", spec.name));
  // Several values may be numbers.
  if (wants_string && spec.shorthand.empty() && spec.values == 1 && !is_list(spec)) {
    throw_bad_request(fmt::format("{} takes text in quotes.", spec.name));
  }
  return text;
}

void set_from_node(Options& options, const OptionSpec& spec, const toml::node& node) {
  const toml::array* array = node.as_array();
  if (array != nullptr && !is_list(spec) && spec.values == 1) {
    throw_bad_request(fmt::format("{} takes one value.", spec.name));
  }
  std::vector<std::string> texts;
  if (array == nullptr) {
    texts.push_back(text_of(spec, node));
  } else {
    for (const toml::node& item : *array) texts.push_back(text_of(spec, item));
  }
  if (spec.values > 1) texts = {fmt::format("{}", fmt::join(texts, " "))};
  // "bf16 = false" leaves the option as it is.
  if (!spec.shorthand.empty() && texts.front() == "false") return;
  for (const std::string& text : texts) set_option(options, spec, text);
}

}  // namespace

std::map<std::string, std::string> option_texts(const std::string& text, const std::string& path) {
  std::map<std::string, std::string> texts;
  const toml::table table = parse_toml(text, path);
  for (auto&& [key, node] : table) {
    texts.insert_or_assign(std::string(key.str()), text_of(node));
  }
  return texts;
}

void read_config_file(const std::string& path, Options& options, std::set<const OptionSpec*>& given,
                      std::vector<std::string>& notes) {
  const std::set<const OptionSpec*> from_command_line = given;
  toml::table table = read_toml_file(path);
  std::set<const OptionSpec*> from_file;
  const auto sets_member = [](const std::set<const OptionSpec*>& specs, const OptionSpec& spec) {
    return std::any_of(specs.begin(), specs.end(),
                       [&](const OptionSpec* other) { return other->member == spec.member; });
  };
  // The command line wins over what it excludes, too.
  const auto is_replaced = [&](const OptionSpec& spec) {
    return std::any_of(from_command_line.begin(), from_command_line.end(),
                       [&](const OptionSpec* other) { return exclude_each_other(*other, spec); });
  };
  for (auto&& [key, node] : table) {
    const std::string name(key.str());
    try {
      const OptionSpec* spec = find_option(name);
      if (const ForeignFlag* flag = find_foreign_flag(name); flag != nullptr) {
        const std::string note =
            accept_foreign_flag(*flag, flag->accepted ? text_of(*flag, node) : std::string());
        if (takes_foreign_flags(options.command)) notes.push_back(note);
        continue;
      }
      if (spec == nullptr || spec->positional) refuse_name(name);
      if (spec->member == OptionMember(&Options::config)) {
        throw_bad_request("a file of options cannot name another one.");
      }
      if (sets_member(from_file, *spec)) {
        throw_bad_request(fmt::format("{} is set twice.", spec->name));
      }
      from_file.insert(spec);
      Options scratch;
      const bool counts = takes(options.command, *spec) && !sets_member(from_command_line, *spec) &&
                          !is_replaced(*spec);
      set_from_node(counts ? options : scratch, *spec, node);
      // A flag that is off is not given: it neither stands for another nor excludes one.
      const auto* flag = node.as_boolean();
      const bool is_off = flag != nullptr && !flag->get();
      if (counts && !is_off) given.insert(spec);
    } catch (const UserError& error) {
      throw_bad_request(fmt::format("{}:{}: {}", path, node.source().begin.line, error.what()));
    }
  }
}

}  // namespace troupe
