#include "base/error.h"

#include <cstdio>
#include <cstdlib>

#include "base/text.h"

namespace troupe {

// Messages quote flags and files.
void throw_bad_request(const std::string& message) {
  throw UserError(ExitStatus::bad_request, without_controls(message));
}

void throw_failed(const std::string& message) {
  throw UserError(ExitStatus::failed, without_controls(message));
}

void abort_with_context(const char* file, int line, const char* condition,
                        const std::string& message) {
  std::fprintf(stderr, "troupe: internal error at %s:%d: %s\n  violated: %s\n", file, line,
               message.c_str(), condition);
  std::fflush(stderr);
  std::abort();
}

}  // namespace troupe
