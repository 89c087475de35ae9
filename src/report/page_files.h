// Files that pages are made of, compiled into the program (cmake/TroupeEmbed.cmake). Constant.
#pragma once

#include <string_view>

namespace troupe {

extern const std::string_view kPageHtml;        // page.html, with places for the others
extern const std::string_view kPageStyle;       // page.css
extern const std::string_view kPageScript;      // page.js: what all pages need
extern const std::string_view kRunPageScript;   // run_page.js
extern const std::string_view kStepPageScript;  // step_page.js
extern const std::string_view kChartLibrary;    // Chart.js

}  // namespace troupe
