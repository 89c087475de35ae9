// A pipe with a name, whose writer is interrupted by signals while it has to wait.
#pragma once

#include <atomic>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

namespace troupe::testing {

// What the constructing thread writes to `path` is more than the pipe holds, so it waits; then
// SIGUSR1, whose handler does not ask for system calls to go on, comes kSignals times, and after
// that all is read. Belongs to one thread; one at a time.
class InterruptedPipe {
 public:
  static constexpr int kSignals = 50;

  explicit InterruptedPipe(const std::string& path) {
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
    EXPECT_GE(descriptor_, 0);
    capacity_ = ::fcntl(descriptor_, F_GETPIPE_SZ);
    struct sigaction action = {};
    action.sa_handler = [](int) { ++signals_seen; };
    sigaction(SIGUSR1, &action, &before_);
    signals_seen = 0;
    reader_ = std::thread([this, writer = pthread_self()] { interrupt_and_read(writer); });
  }
  InterruptedPipe(const InterruptedPipe&) = delete;
  InterruptedPipe& operator=(const InterruptedPipe&) = delete;
  ~InterruptedPipe() { end(); }

  // More than the pipe holds.
  std::string too_much() const {
    std::string text;
    while (text.size() < 2 * static_cast<size_t>(capacity_) + 10) {
      text += std::to_string(text.size()) + "\n";
    }
    return text;
  }

  // What has come, once the writer has closed its end.
  const std::string& end() {
    if (reader_.joinable()) {
      reader_.join();
      ::close(descriptor_);
      sigaction(SIGUSR1, &before_, nullptr);
    }
    return contents_;
  }

 private:
  void interrupt_and_read(pthread_t writer) {
    pollfd readable = {.fd = descriptor_, .events = POLLIN, .revents = 0};
    ::poll(&readable, 1, -1);  // the writer has begun
    for (int sent = 1; sent <= kSignals && (readable.revents & POLLIN) != 0; ++sent) {
      pthread_kill(writer, SIGUSR1);
      while (signals_seen < sent) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it waits again
    }
    ::fcntl(descriptor_, F_SETFL, 0);
    char bytes[4096];
    for (ssize_t count = 0; (count = ::read(descriptor_, bytes, sizeof(bytes))) > 0;) {
      contents_.append(bytes, static_cast<size_t>(count));
    }
  }

  inline static std::atomic<int> signals_seen = 0;
  int descriptor_ = -1;
  int capacity_ = 0;
  struct sigaction before_ = {};
  std::thread reader_;
  std::string contents_;
};

}  // namespace troupe::testing
