#include "train/work_progress.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "train/interrupt.h"

namespace troupe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kSilence{1};  // what takes less says nothing
constexpr std::chrono::milliseconds kLiveInterval{100};
constexpr std::chrono::seconds kPlainInterval{15};

}  // namespace

WorkProgress::WorkProgress(bool quiet, std::string what, std::string unit, std::string interrupted)
    : quiet_(quiet),
      what_(std::move(what)),
      unit_(std::move(unit)),
      interrupted_(std::move(interrupted)),
      start_(Clock::now()),
      shown_(start_) {}

WorkProgress::~WorkProgress() {
  line_.clear();
}

std::string WorkProgress::describe(uint64_t done, uint64_t total, double seconds) const {
  const double share =
      static_cast<double>(done) / static_cast<double>(std::max<uint64_t>(1, total));
  const double speed = static_cast<double>(done) / seconds;
  std::string text =
      unit_.empty() ? fmt::format("{} {:.0f}% of {} | {}/s", what_, 100 * share,
                                  format_bytes(total), format_bytes(static_cast<uint64_t>(speed)))
                    : fmt::format("{} {}/{} {}", what_, done, total, unit_);
  if (done == 0) return text;
  if (!unit_.empty()) text += fmt::format(" | {:.3g} per second", speed);
  return text + " | " + format_time_left(seconds * (1 - share) / share);
}

void WorkProgress::show(uint64_t done, uint64_t total, bool at_once) {
  if (interrupt_requested()) throw UserError(ExitStatus::interrupted, interrupted_);
  const auto now = Clock::now();
  at_once = at_once && line_.on_terminal();
  if (quiet_ || (now - start_ < kSilence && !at_once)) return;
  const Clock::duration interval =
      line_.on_terminal() ? Clock::duration(kLiveInterval) : Clock::duration(kPlainInterval);
  if (now - shown_ < interval && !at_once) return;
  shown_ = now;
  const std::string text =
      describe(done, total, std::chrono::duration<double>(now - start_).count());
  if (line_.on_terminal()) {
    line_.live(text);
  } else {
    line_.stay(text);
  }
}

WorkReport WorkProgress::report() {
  return [this](uint64_t done, uint64_t total) { show(done, total); };
}

}  // namespace troupe
