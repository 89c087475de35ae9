// The program: reads the command line, runs the command, and turns errors into one line and an exit
// status.
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "cli/command.h"
#include "train/command_line.h"

namespace troupe {
namespace {

ExitStatus report(ExitStatus status, const char* message) {
  std::fprintf(stderr, "troupe: %s\n", message);
  return status;
}

// Mapped files whose end is gone raise SIGBUS where they are read. Nothing can be gone back to.
void handle_bus_error(int) {
  static constexpr std::string_view kMessage =
      "troupe: a data or model file became shorter while it was read, or its disk fails. "
      "Checkpoints are intact.\n";
  // There is nobody to tell when standard error is closed.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage.data(), kMessage.size());
  _exit(static_cast<int>(ExitStatus::failed));
}

void install_file_signal_handlers() {
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = handle_bus_error;
  sigaction(SIGBUS, &action, nullptr);
  // A file beyond the limit of its size is then an error of the write, as a full disk is.
  action.sa_handler = SIG_IGN;
  sigaction(SIGXFSZ, &action, nullptr);
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
    if (!command_line.options.quiet) {
      for (const std::string& note : command_line.notes) {
        std::fprintf(stderr, "%s\n", note.c_str());
      }
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
  troupe::install_file_signal_handlers();
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  return static_cast<int>(troupe::run(arguments));
}
