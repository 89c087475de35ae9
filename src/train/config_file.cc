#include "train/config_file.h"

#include <algorithm>
#include <fmt/format.h>
#include <sstream>
#include <string_view>
#include <vector>

// Malformed files reach an assertion of toml++ 3.3 in builds that have assertions; without it the
// library reports them as it should.
#define TOML_ASSERT(condition) static_cast<void>(0)
#include <toml++/toml.h>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "train/foreign_flags.h"
#include "train/suggest.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 20;

[[noreturn]] void refuse_name(const std::string& name) {
  if (const std::string_view answer = answer_to_foreign_flag(name); !answer.empty()) {
    throw_bad_request(fmt::format("{}: {}", name, answer));
  }
  std::vector<std::string_view> candidates;
  for (const OptionSpec& spec : option_table()) {
    if (!spec.positional) candidates.push_back(spec.name);
  }
  const std::string_view guess = closest(name, candidates);
  throw_bad_request(fmt::format(
      "there is no option {}.{}", quote_name(name),
      guess.empty() ? " docs/options.md lists them." : fmt::format(" Did you mean {}?", guess)));
}

// One value as the command line would have it.
std::string text_of(const OptionSpec& spec, const toml::node& node) {
  const bool wants_string =
      std::holds_alternative<std::string Options::*>(spec.member) || is_list(spec);
  if (const auto* text = node.as_string()) {
    if (wants_string && spec.shorthand.empty()) return text->get();
    throw_bad_request(fmt::format("{} takes no text in quotes.", spec.name));
  }
  std::string text;
  if (const auto* number = node.as_integer()) text = fmt::format("{}", number->get());
  if (const auto* number = node.as_floating_point()) text = fmt::format("{}", number->get());
  if (const auto* flag = node.as_boolean()) text = fmt::format("{}", flag->get());
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

// toml++ 3.3 has undefined behaviour for some characters beyond ASCII where white space may stand.
// TOML knows such characters in quotes and comments alone; they are also refused behind a backslash
// that joins lines, where TOML allows them. A file that is wrong in another way is left to the
// library.
void refuse_unquoted_characters(std::string_view text, const std::string& path) {
  enum class Within { nothing, comment, quotes } within = Within::nothing;
  std::string_view quote;  // which ends the quotes
  const auto starts = [&](size_t at, std::string_view part) {
    return text.substr(at, part.size()) == part;
  };
  for (size_t at = starts(0, "\xef\xbb\xbf") ? 3 : 0; at < text.size(); ++at) {
    bool refused = false;
    const char c = text[at];
    switch (within) {
      case Within::nothing:
        refused = static_cast<unsigned char>(c) >= 0x80;
        if (c == '#') within = Within::comment;
        if (c == '"' || c == '\'') {
          within = Within::quotes;
          const bool is_long = starts(at, std::string(3, c));
          quote = text.substr(at, is_long ? 3 : 1);
          at += quote.size() - 1;
        }
        break;
      case Within::comment:
        if (c == '\n') within = Within::nothing;
        break;
      case Within::quotes:
        if (c == '\\' && quote.front() == '"') {
          const size_t next =
              quote.size() == 1 ? at + 1 : text.find_first_not_of(" \t\r\n", at + 1);
          refused = next < text.size() && static_cast<unsigned char>(text[next]) >= 0x80;
          at += 1;
        } else if (starts(at, quote)) {
          // Long quotes may have one or two of their kind before their end.
          at += quote.size() - 1;
          for (int i = 0; i < 2 && quote.size() == 3 && starts(at + 1, quote.substr(0, 1)); ++i)
            ++at;
          within = Within::nothing;
        } else if (c == '\n' && quote.size() == 1) {
          return;
        }
        break;
    }
    if (refused) {
      throw_bad_request(fmt::format(
          "{}:{}: characters beyond ASCII must be in quotes, and not behind a backslash.", path,
          1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(at), '\n')));
    }
  }
}

}  // namespace

void read_config_file(const std::string& path, Options& options,
                      std::set<const OptionSpec*>& given) {
  const std::set<const OptionSpec*> from_command_line = given;
  const std::string text = read_file(path, kMaxFileBytes);
  refuse_unquoted_characters(text, path);
  toml::table table;
  try {
    table = toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    throw_bad_request(fmt::format("{}:{}: {}.", path, error.source().begin.line,
                                  printable(error.description(), kLongestComplaint)));
  }
  std::set<const OptionSpec*> from_file;
  const auto sets_member = [](const std::set<const OptionSpec*>& specs, const OptionSpec& spec) {
    return std::any_of(specs.begin(), specs.end(),
                       [&](const OptionSpec* other) { return other->member == spec.member; });
  };
  // The command line wins over what it excludes, too.
  const auto is_replaced = [&](const OptionSpec& spec) {
    return std::any_of(from_command_line.begin(), from_command_line.end(),
                       [&](const OptionSpec* other) {
                         return other->instead == spec.name || other->name == spec.instead;
                       });
  };
  for (auto&& [key, node] : table) {
    const std::string name(key.str());
    try {
      const OptionSpec* spec = find_option(name);
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
      if (counts) given.insert(spec);
    } catch (const UserError& error) {
      throw_bad_request(fmt::format("{}:{}: {}", path, node.source().begin.line, error.what()));
    }
  }
}

}  // namespace troupe
