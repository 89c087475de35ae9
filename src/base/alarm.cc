#include "base/alarm.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/error.h"

namespace troupe {

Alarm::Alarm(std::chrono::milliseconds limit, std::string text)
    : thread_([this, limit, text = std::move(text)] { watch(limit, text); }) {}

Alarm::~Alarm() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Alarm::watch(std::chrono::milliseconds limit, const std::string& text) {
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, limit, [this] { return is_over_; })) return;
  std::fprintf(stderr, "troupe: %s The wait cannot be stopped; the process exits.\n", text.c_str());
  std::fflush(nullptr);
  std::_Exit(static_cast<int>(ExitStatus::failed));
}

}  // namespace troupe
