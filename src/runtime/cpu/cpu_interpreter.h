// The CPU interpreter: runs a program, one operation after the other, each on all threads of a
// pool.
//
// Everything is decided before the first run: one arena as the memory plan says, for each operation
// a function pointer and a block of arguments. A run allocates nothing and reads no data. With an
// oracle plan (plan_oracle) it is the oracle: every value has memory of its own, and the memory of
// dead values, as scratch memory before each operation, is filled with NaN.
//
// Owns its arena, unless it is lent one (InterpreterOptions::memory_of); borrows the program, the
// state, the pool and the communicators, which must outlive it. One thread at a time. Where the
// program has collectives, every rank's interpreter runs on a thread of its own, and a run throws
// what its communicator throws (program/communicator.h); what the tensors hold is then unspecified.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "passes/memory_plan.h"
#include "program/communicator.h"
#include "program/program.h"
#include "runtime/arena.h"
#include "runtime/host_memory.h"
#include "runtime/interpreter.h"
#include "runtime/operands.h"
#include "runtime/state_storage.h"

namespace troupe {

class CpuInterpreter final : public Interpreter {
 public:
  CpuInterpreter(const Program& program, MemoryPlan plan, const StateStorage& state,
                 ThreadPool& pool, const Communicators& communicators = {},
                 const InterpreterOptions& options = {});

  // The memory of any value; what is no input, metric or result holds what the plan left there.
  TensorView view(ValueId id) const override;

  void run() override;
  // Runs a single operation. A caller that runs them in another order than the program's must know
  // that this order is valid.
  void run_op(int32_t index) const;
  void run_observed(const std::function<void(int32_t)>& after) override;
  std::vector<WorkSpan> run_profiled() override;
  void read(ValueId id, void* bytes) const override;
  void write(ValueId id, const void* bytes) override;
  const MemoryPlan& plan() const override { return plan_; }

  // Equals persistent + transient + scratch bytes of the plan, and the transient ones of the host.
  uint64_t allocated_bytes() const override {
    return memory_->arena.bytes() + memory_->host.bytes();
  }

 private:
  struct BoundOp {
    CpuKernel kernel = nullptr;
    KernelArguments arguments;
  };
  struct Memory {
    Arena arena;
    HostMemory host;
  };
  void bind();
  void poison(ValueId id);
  void poison_scratch();
  std::byte* scratch() const;

  const Program& program_;
  MemoryPlan plan_;
  const StateStorage& state_;
  ThreadPool& pool_;
  Communicators communicators_;
  std::shared_ptr<const Memory> memory_;
  Operands<TensorView> operands_;
  std::vector<BoundOp> ops_;
};

}  // namespace troupe
