// JSON from files of users, with messages that are short and name the place: the JSON library's own
// quote the text and count lines from the start of what it was given. And JSON for users.
//
// Any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace troupe {

// The value that `text` is. Nothing where it is none: `problem` then says why, to be appended to
// the name of the file ("not valid JSON at byte 10", bytes counted from 1).
std::optional<nlohmann::json> parse_json_text(std::string_view text, std::string& problem);

// What a command prints as its result, with the end of the last line. Bytes that are no UTF-8, as
// in names of files, are replaced.
std::string printed_json(const nlohmann::ordered_json& document);

}  // namespace troupe
