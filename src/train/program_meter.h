// Runs a small program as a step's programs are run, and says how long its operations took: what a
// calibration consists of (train/calibration.h).
//
// One thread, which starts others. Errors are UserErrors.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/thread_pool.h"
#include "program/builder.h"
#include "program/communicator.h"
#include "train/step_profile.h"

namespace troupe {

class ProgramMeter {
 public:
  // Emits the operations, of tensors that the program reads, and returns the result.
  using Emit = std::function<ValueId(Builder&, const std::vector<ValueId>&)>;
  // Sees several runs of the program.
  using See = std::function<void(const Program&, const StepProfile&)>;

  // On `gpu` or on threads. `communicators`: those of a rank that runs its programs together with
  // others; they are borrowed.
  ProgramMeter(Device device, int gpu, int threads, const Communicators& communicators = {});

  Device device() const { return device_; }
  ThreadPool& pool() { return pool_; }

  // The program of these tensors, which hold random numbers. Of several ranks all call it at once.
  void profile(const std::vector<StateTensor>& tensors, const Emit& emit, const See& see);

 private:
  Device device_;
  int gpu_;
  ThreadPool pool_;
  Communicators communicators_;
  DeviceTraits traits_;
};

// Of all operations of a kind that was run; at least a nanosecond.
KindTime time_of(const StepProfile& profile, std::string_view kind);

}  // namespace troupe
