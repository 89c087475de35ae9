// JSON text of files that nobody vouches for.
//
// Callable from any thread. The result owns all it holds. Include <nlohmann/json.hpp> in the .cc
// that looks into it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace troupe {

// Parses one JSON document. Invalid JSON, a name given twice in one object and nesting deeper than
// `max_depth` are refused with a UserError (exit status 1) that names `path`.
nlohmann::json parse_json(std::string_view text, const std::string& path, int max_depth);

// A name from a file, fit for a message: in quotes, control characters replaced, long names cut.
std::string quote_name(std::string_view name);

}  // namespace troupe
