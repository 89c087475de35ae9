// What a person sees while a command loads, writes, evaluates or measures: after the first second
// one live line with what is done, the speed and the time left; without a terminal a line every
// fifteen seconds. Writes to standard error only. One thread, which may be another one each time
// that the ones before have finished.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "base/work_report.h"
#include "train/terminal.h"

namespace troupe {

class WorkProgress {
 public:
  // `what` is done: "loading". `unit` of what is counted, in the plural; empty: bytes. `quiet`
  // prints nothing. `interrupted`: the message of the UserError that ends the work when
  // interrupt_requested() (train/interrupt.h).
  WorkProgress(bool quiet, std::string what, std::string unit = {},
               std::string interrupted = "Interrupted.");
  // Takes the live line away.
  ~WorkProgress();
  WorkProgress(const WorkProgress&) = delete;
  WorkProgress& operator=(const WorkProgress&) = delete;

  // `at_once`: of work that is known to take long, on a terminal also within the first second.
  void show(uint64_t done, uint64_t total, bool at_once = false);
  // Takes the live line away.
  void clear() { line_.clear(); }
  // show() as a function, which borrows this object.
  WorkReport report();

 private:
  std::string describe(uint64_t done, uint64_t total, double seconds) const;

  bool quiet_;
  std::string what_;
  std::string unit_;
  std::string interrupted_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point shown_;  // when the last line was written, or start_
  LiveLine line_;
};

}  // namespace troupe
