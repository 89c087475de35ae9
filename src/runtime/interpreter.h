// Interpreter: runs a program, whatever it runs on. What differs between the CPU and a GPU is
// hidden by this interface; the training loop, evaluation and checkpoints know only it.
//
// The host writes inputs into view() before a run and reads metrics and results from it after one.
// On the CPU that is the memory the program works with, on a GPU a copy that travels with each run.
// One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "passes/memory_plan.h"
#include "program/communicator.h"
#include "program/program.h"
#include "runtime/state_storage.h"

namespace troupe {

// A piece of work of one run: an operation on the CPU; a kernel, a copy or a fill on a GPU.
struct WorkSpan {
  int32_t op = -1;     // in the program; -1: inputs, metrics and results on their way
  std::string name;    // of the operation's kind, or of the kernel
  double begin_s = 0;  // since the first span began
  double duration_s = 0;
};

class Interpreter;

struct InterpreterOptions {
  // Of the same device, whose plan has at least as much memory: works in that memory instead of
  // memory of its own. One of the two runs at a time, and the other must outlive this one.
  const Interpreter* memory_of = nullptr;
  // On a GPU: the second run is recorded as a CUDA graph, and the ones after it replay it, which
  // changes no bit.
  bool capture = false;
  // run_profiled() will be called, on all ranks. On a GPU an early run is traced to learn what each
  // operation launches. Ranks that share a GPU cannot be profiled: their kernels could not be told
  // apart.
  bool profile = false;
  // Several ranks share a GPU. They wait for each other in kernels, and CUDA does not promise that
  // what another rank does on that GPU goes on meanwhile: neither what it has launched on one of
  // many streams, so the operations of all queues run one after the other; nor what its host asks
  // for between two runs, as to copy a tensor, so all ranks begin a run together.
  bool shares_gpu = false;
};

class Interpreter {
 public:
  virtual ~Interpreter() = default;

  // The host's memory of an input, a metric or a result of the program.
  virtual TensorView view(ValueId id) const = 0;

  // Runs the program and waits for its end.
  virtual void run() = 0;

  // As run(), and calls after(operation) when each operation has finished.
  virtual void run_observed(const std::function<void(int32_t)>& after) = 0;

  // As run(), and says what was done when, in the order of the beginnings. All ranks of a run call
  // it at once, or none.
  virtual std::vector<WorkSpan> run_profiled() = 0;

  // For observers: the bytes of any value as they are now, and other bytes in their place. Inputs
  // and metrics are those that the operations work with, not those of view().
  virtual void read(ValueId id, void* bytes) const = 0;
  virtual void write(ValueId id, const void* bytes) = 0;

  // What only a run tells, after the first one: the operations, ascending, that were done by a
  // plain kernel because the library with the fast ones has none for them on this device.
  virtual std::vector<int32_t> operations_without_algorithm() const { return {}; }

  virtual const MemoryPlan& plan() const = 0;
  // What this interpreter holds on its device, without the state: as the plan says.
  virtual uint64_t allocated_bytes() const = 0;
};

}  // namespace troupe
