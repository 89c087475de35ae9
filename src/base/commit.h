// The state of the sources that this program was built from. The build writes the definition
// (cmake/WriteCommit.cmake). Any thread.
#pragma once

#include <string_view>

namespace troupe {

// The commit's first twelve digits, with "-dirty" where files were changed since; "unknown" where
// the sources came without their history.
std::string_view build_commit();

}  // namespace troupe
