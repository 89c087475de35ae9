# Writes OUTPUT, the definition of build_commit() (src/base/commit.h), where it has changed.
# Usage: cmake -D SOURCE=<project folder> -D OUTPUT=<file> -P WriteCommit.cmake
execute_process(
  COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
if(NOT "${result}" STREQUAL "0")
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "base/commit.h"

namespace troupe {

std::string_view build_commit() {
  return "@commit@";
}

}  // namespace troupe
]])
