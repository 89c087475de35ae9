#include "options/option_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <variant>
#include <vector>

namespace troupe {
namespace {

constexpr ExitStatusText kExitStatuses[] = {
    {ExitStatus::done, "done"},
    {ExitStatus::failed, "failed while running"},
    {ExitStatus::bad_request, "the request is wrong: a flag, a file, a combination"},
    {ExitStatus::does_not_fit, "it does not fit, or the plan is refused"},
    {ExitStatus::interrupted, "interrupted, after saving"},
};

}  // namespace

std::span<const ExitStatusText> exit_status_texts() {
  return kExitStatuses;
}

std::string usage_of(const OptionSpec& spec) {
  if (spec.positional) return std::string(spec.name);
  if (std::holds_alternative<std::optional<bool> Options::*>(spec.member)) {
    return flag_of(spec) + "[=true|false]";
  }
  return needs_value(spec) ? fmt::format("{} {}", flag_of(spec), spec.metavar) : flag_of(spec);
}

std::string default_text(const OptionSpec& spec) {
  const std::string value = needs_value(spec) ? value_text(Options{}, spec) : std::string();
  return value.empty() ? std::string(spec.unset) : value;
}

bool is_global(const OptionSpec& spec) {
  return spec.group == option_table().front().group;
}

std::string explanation_of(const OptionSpec& spec, Command command) {
  std::vector<std::string> facts;
  if (requires_option(command, spec)) {
    facts.emplace_back("required");
  } else if (const std::string text = default_text(spec); !text.empty()) {
    facts.push_back("default: " + text);
  }
  if (const std::string range = range_text(spec); !range.empty() && choices_of(spec).size() != 1) {
    facts.push_back(range);
  }
  std::string text(spec.help);
  if (!facts.empty()) text += fmt::format(" [{}]", fmt::join(facts, "; "));
  return text;
}

std::string usage_line(Command command) {
  std::string line = fmt::format("troupe {}", info_of(command).name);
  for (const OptionSpec& spec : option_table()) {
    if (!takes(command, spec)) continue;
    if (requires_option(command, spec)) {
      line += " " + usage_of(spec);
    } else if (spec.positional) {
      line += fmt::format(" [{}]", spec.name);
    }
  }
  return line + " [FLAGS]";
}

}  // namespace troupe
