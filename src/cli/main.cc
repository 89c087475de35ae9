// The program: reads the command line, runs the command, and turns errors into one line and an exit
// status.
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "cli/command.h"
#include "train/command_line.h"

namespace troupe {
namespace {

ExitStatus report(ExitStatus status, const char* message) {
  std::fprintf(stderr, "troupe: %s\n", message);
  return status;
}

// What is still in the buffer must reach its reader before the program may claim success.
ExitStatus flush_output(ExitStatus status) {
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (!failed || status != ExitStatus::done) return status;
  return report(ExitStatus::failed, "standard output cannot be written (is the disk full?).");
}

ExitStatus run(const std::vector<std::string>& arguments) {
  try {
    const CommandLine command_line = parse_command_line(arguments);
    if (!command_line.text.empty()) {
      std::fputs(command_line.text.c_str(), stdout);
      return flush_output(ExitStatus::done);
    }
    return flush_output(run_command(command_line.options));
  } catch (const UserError& error) {
    return report(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return report(ExitStatus::failed, "out of memory.");
  } catch (const std::exception& error) {
    return report(ExitStatus::failed, error.what());
  }
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(troupe::run(arguments));
}
