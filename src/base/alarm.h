// Alarm: a limit for a call into a library that waits for other ranks and cannot be stopped.
//
// While an Alarm lives, a thread of its own watches the clock. If the limit passes first, the text
// goes to standard error and the process ends at once, with ExitStatus::failed: who waits for a
// rank that never comes must not wait forever, and silently. Any thread may make one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace troupe {

class Alarm {
 public:
  // `text`: a sentence that says which rank waits where, and for which ranks.
  Alarm(std::chrono::milliseconds limit, std::string text);
  ~Alarm();
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  void watch(std::chrono::milliseconds limit, const std::string& text);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace troupe
