// JSON text of untrusted files.
//
// Callable from any thread. The result owns all it holds. Include <nlohmann/json.hpp> in the .cc
// that looks into it.
#pragma once

#include <cstdint>
#include <exception>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace troupe {

// Parses one JSON document. Invalid JSON, a name given twice in one object and nesting deeper than
// `max_depth` are refused with a UserError (exit status 1) that names `path`.
nlohmann::json parse_json(std::string_view text, const std::string& path, int max_depth);

// The whole number under `name` in an object. Anything else, also one outside [min, max], is
// refused with a UserError (exit status 1) that names `where` and the field. (The library's own
// conversions cut numbers that do not fit.)
int64_t integer_field(const nlohmann::json& object, const char* name, int64_t min, int64_t max,
                      const std::string& where);

// What a json::exception says, for a person: without the library's name and number before it, and
// printable.
std::string reason_of(const std::exception& error);

}  // namespace troupe
