// One rank of a run: its number and its group, the threads and the GPU that it computes with, its
// part of the model, and the memory of that. Each rank of train, eval, generate, bench and verify
// works with one.
//
// The order is the same for all: declare() the state, plan() the programs on it, check() them with
// the other ranks, allocate(), and make each interpreter(). Nothing large is allocated before.
//
// Borrows the group. One thread per rank; what says "all ranks" is called by all of them at once.
// Errors are UserErrors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "comm/process_group.h"
#include "model/parameters.h"
#include "options/device_options.h"
#include "runtime/interpreter.h"
#include "runtime/state_storage.h"
#include "train/planned_program.h"

namespace troupe {

class RankSession {
 public:
  // Rank `rank` of `group`, which has the ranks of `spec`; null for a run of one rank. Refuses a
  // GPU that is not there.
  RankSession(const DeviceSpec& spec, int32_t rank, ProcessGroup* group);

  const DeviceSpec& spec() const { return spec_; }
  int32_t rank() const { return rank_; }
  bool leads() const { return rank_ == 0; }
  ProcessGroup* group() const { return group_; }
  Device device() const { return spec_.device; }
  int gpu() const { return gpu_; }  // of Device::cuda
  ThreadPool& pool() { return pool_; }
  int threads() const { return pool_.threads(); }

  // The rank's part of the model; `trained` adds gradients and optimizer state.
  void declare(const ModelConfig& config, DType dtype, bool trained,
               std::shared_ptr<const RunLayout> layout);
  const ModelState& state() const { return state_; }
  const ModelPart& part() const { return state_.part; }
  const Layout& layout() const { return state_.part.layout(); }

  // The memory of a program on the state, which is verified, on this rank's device. `oracle`:
  // without any reuse.
  MemoryPlan plan(const Program& program, bool oracle = false) const;

  // What a refusal offers to a rank that needs `bytes` where there are `available`.
  using Remedies = std::function<std::string(uint64_t bytes, uint64_t available)>;

  // All ranks, before anything is allocated: refuses (does_not_fit) what the machine, or its GPUs,
  // have no memory for, and programs whose collectives do not fit together. A GPU that more ranks
  // have got than may share one is a bad request. The programs are there at once, on one state;
  // `others`: the bytes of the rank's other sessions.
  void check(const std::vector<PlannedProgram>& programs, const Remedies& remedies,
             uint64_t others = 0) const;
  // The collectives alone, of a program that takes the place of one that was checked.
  void check_collectives(const Program& program) const;

  // The memory of the state: zeros.
  void allocate();
  const StateStorage& storage() const { return *storage_; }

  // Allocates what the plan says. Borrows the program and the session.
  std::unique_ptr<Interpreter> interpreter(const Program& program, MemoryPlan plan,
                                           InterpreterOptions options = {});

  // All ranks, outside of programs: what each has given, by rank.
  std::vector<uint64_t> exchange(uint64_t value) const;
  // All ranks: returns when all have come.
  void barrier() const { exchange(0); }

 private:
  void require_memory(const MemoryPlan& plan, uint64_t beside, uint64_t others,
                      const Remedies& remedies) const;
  void require_host_memory(const MemoryPlan& plan) const;

  DeviceSpec spec_;
  int32_t rank_;
  ProcessGroup* group_;
  int gpu_;
  ThreadPool pool_;
  ModelState state_;
  std::optional<StateStorage> storage_;
};

// The remedy of commands that do not train.
std::string remedy_of_inference(uint64_t bytes, uint64_t available);

}  // namespace troupe
