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

// A terminal that goes away says so more than once: through the shell, and when that has ended.
void handle_hangup(int) {
  requested = true;
}

void handle_signal(int) {
  static constexpr std::string_view kFirst =
      "\ntroupe: stopping after what is under way; interrupt again to stop at once\n";
  static constexpr std::string_view kSecond = "\ntroupe: stopped at once; nothing more was saved\n";
  const bool is_second = requested.exchange(true);
  const std::string_view message = is_second ? kSecond : kFirst;
  if (!says_nothing) {
    // There is nothing to write to when standard error is closed.
    [[maybe_unused]] const auto written = write(STDERR_FILENO, message.data(), message.size());
  }
  if (is_second) _exit(static_cast<int>(ExitStatus::interrupted));
}

void handle_signal_at_once(int) {
  static constexpr std::string_view kMessage = "\ntroupe: interrupted\n";
  if (!says_nothing) {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, kMessage.data(), kMessage.size());
  }
  _exit(static_cast<int>(ExitStatus::interrupted));
}

void install(void (*handler)(int), void (*hangup_handler)(int), bool quiet) {
  if (quiet) says_nothing = true;
  struct sigaction action = {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // file operations under way go on
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return;
  action.sa_handler = hangup_handler;
  sigaction(SIGHUP, &action, nullptr);
}

}  // namespace

std::atomic<bool>& interrupt_requested() {
  return requested;
}

void install_interrupt_handlers(bool quiet) {
  install(handle_signal, handle_hangup, quiet);
}

void ignore_broken_pipes() {
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
}

void end_at_once_when_interrupted(bool quiet) {
  install(handle_signal_at_once, handle_signal_at_once, quiet);
}

}  // namespace troupe
