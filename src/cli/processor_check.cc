// Ends the program (status 2) where the processor lacks instructions that it was compiled to use.
// Before anything else runs: constructors of globals may use such instructions, too.
#include <cstring>
#include <unistd.h>

#include "base/processor.h"

namespace troupe {
namespace {

void write_error(const char* text) {
  // There is nothing to write to when standard error is closed.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, strlen(text));
}

__attribute__((constructor(101))) void check_processor() {
  char missing[128];
  if (!name_missing_instructions(kNeededInstructions, processor_instructions(), missing,
                                 sizeof(missing))) {
    return;
  }
  write_error("troupe: this program was built for newer processors: this one lacks\n  ");
  write_error(missing);
  write_error(
      ".\n  Build it on this machine (make install), or for an older processor\n"
      "  (make package ARCH=x86-64-v2).\n");
  _exit(2);
}

}  // namespace
}  // namespace troupe
