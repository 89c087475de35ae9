#include "train/interrupt.h"

#include <csignal>
#include <string_view>
#include <unistd.h>

#include "base/error.h"

namespace troupe {
namespace {

// Lock-free, so a signal handler may touch it.
std::atomic<bool> requested{false};
std::atomic<bool> says_nothing{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void handle_signal(int) {
  if (requested.exchange(true)) _exit(static_cast<int>(ExitStatus::interrupted));
  if (says_nothing) return;
  static constexpr std::string_view kMessage =
      "\ntroupe: stopping cleanly; interrupt again to stop at once\n";
  // There is nobody to tell when standard error is closed.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage.data(), kMessage.size());
}

}  // namespace

std::atomic<bool>& interrupt_requested() {
  return requested;
}

void install_interrupt_handlers(bool quiet) {
  if (quiet) says_nothing = true;
  struct sigaction action = {};
  action.sa_handler = handle_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // file operations under way go on
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);
}

}  // namespace troupe
