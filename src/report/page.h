// Pages for a browser: one file of HTML with everything in it, which loads nothing.
//
// A page is page.html with style, scripts, the library of charts and the data, one JSON document
// that the scripts show. It says in its first lines which command wrote it, so that a command
// replaces only pages of its own. Any thread; errors are UserErrors.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace troupe {

enum class PageKind : uint8_t {
  runs,  // `troupe report`, run_page.js
  step,  // `troupe inspect`, step_page.js
};

// The page with this title and these data.
std::string make_page(PageKind kind, const std::string& title, const nlohmann::ordered_json& data);

// Refuses (bad request) a path that names a folder, or a file that is no page of this kind. `flag`
// says which other path to give.
void check_page_path(PageKind kind, const std::string& path, const std::string& flag);

// Writes the page, after check_page_path(), in the place of an earlier one.
void write_page(PageKind kind, const std::string& path, const std::string& flag,
                const std::string& page);

}  // namespace troupe
