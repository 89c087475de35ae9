#include "options/refusals.h"

#include <algorithm>
#include <variant>

#include "base/error.h"
#include "options/options.h"

namespace troupe {
namespace {

std::string flag_of(Setting setting) {
  const auto table = option_table();
  const auto found = std::find_if(table.begin(), table.end(),
                                  [&](const OptionSpec& spec) { return spec.setting == setting; });
  TROUPE_CHECK(found != table.end(), "a setting that an option makes");
  return flag_of(*found);
}

}  // namespace

std::string text_of(const Refusal& refusal) {
  std::string text;
  for (const auto& part : refusal.message) {
    const auto* setting = std::get_if<Setting>(&part);
    text += setting != nullptr ? flag_of(*setting) : std::get<std::string>(part);
  }
  return text;
}

void throw_refusal(const Refusal& refusal) {
  throw_bad_request(text_of(refusal));
}

void require_accepted(const std::optional<Refusal>& refusal) {
  if (refusal) throw_refusal(*refusal);
}

}  // namespace troupe
