#include "data/json_text.h"

#include <fmt/format.h>

namespace troupe {

std::optional<nlohmann::json> parse_json_text(std::string_view text, std::string& problem) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    problem = fmt::format("not valid JSON at byte {}", error.byte);
  } catch (const nlohmann::json::out_of_range&) {
    problem = "valid JSON, but a number in it is too large";
  }
  return std::nullopt;
}

std::string printed_json(const nlohmann::ordered_json& document) {
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace troupe
