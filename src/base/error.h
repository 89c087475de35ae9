// Errors, in two kinds that never mix.
//
// A user's mistake (a flag, a file, a combination) is a UserError: one message that says what is
// wrong, where, and what to do about it. The command line catches it at the very top, prints the
// message alone and exits with its status. A broken invariant of our own is TROUPE_CHECK: it prints
// file, line and the message and aborts, because nothing after it can be trusted.
//
// Both may be used from any thread.
#pragma once

#include <stdexcept>
#include <string>

namespace troupe {

// The program's exit statuses; they are part of the command line's contract.
enum class ExitStatus : int {
  done = 0,
  failed = 1,         // something went wrong while running (a file, the disk, the network)
  bad_request = 2,    // the user's request is wrong (flag, file, combination)
  does_not_fit = 3,   // the plan is refused
  interrupted = 130,  // interrupted by the user, after saving
};

// A failure that the user can understand and act on. `what()` is the complete message.
class UserError : public std::runtime_error {
 public:
  UserError(ExitStatus status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

// The request itself is wrong: exit status 2.
[[noreturn]] void throw_bad_request(const std::string& message);

// The request was fine but something failed while it was carried out: exit status 1.
[[noreturn]] void throw_failed(const std::string& message);

// Prints the location and the message to standard error and aborts.
[[noreturn]] void abort_with_context(const char* file, int line, const char* condition,
                                     const std::string& message);

}  // namespace troupe

// Checks an invariant of this program (never a user's input). `message` is evaluated only when the
// condition is false, so it may be an expensive expression.
#define TROUPE_CHECK(condition, message)                                       \
  do {                                                                         \
    if (!(condition)) [[unlikely]]                                             \
      ::troupe::abort_with_context(__FILE__, __LINE__, #condition, (message)); \
  } while (false)
