// Where everything that a program works with lies: what the memory plan (memory_plan.h) decides,
// and interpreters allocate. Sizes are bytes, offsets count from the begin of an arena, and both
// are multiples of MemoryPlan::kAlignment.
//
// Plain values.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/device.h"
#include "base/id_vector.h"
#include "program/kernel_choice.h"
#include "program/program.h"

namespace troupe {

// Where each state tensor lies in the state arena, or in that of the host. Depends on the table
// alone. Gradients, which no checkpoint holds, come after all others in the state arena.
struct StateLayout {
  explicit StateLayout(const StateTable& state);
  std::vector<uint64_t> offset;  // by StateId, in the tensor's arena
  uint64_t bytes = 0;            // of the state arena
  uint64_t lasting_bytes = 0;    // of these, before the gradients
  uint64_t host_bytes = 0;       // of the host's
  std::array<uint64_t, kRoleCount> bytes_by_role{};
  std::array<uint64_t, kRoleCount> host_bytes_by_role{};
};

struct MemoryPlan {
  // What GPUs allocate at, and two lines of their L2 cache: kernels that read and write rows in
  // place take a third longer at odd multiples of 64 (docs/benchmarks/cuda.md).
  static constexpr uint64_t kAlignment = 256;
  static constexpr uint64_t aligned(uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Of a kernel on a GPU: its scratch memory, and after it what it receives into, both aligned.
  static constexpr uint64_t bytes_of(const KernelNeeds& needs) {
    return aligned(needs.scratch) + aligned(needs.staging);
  }

  std::vector<uint64_t> offset;  // by ValueId, in the persistent or a transient arena
  uint64_t state_bytes = 0;
  uint64_t persistent_bytes = 0;
  uint64_t transient_bytes = 0;
  uint64_t host_state_bytes = 0;
  uint64_t host_transient_bytes = 0;
  uint64_t scratch_bytes_per_thread = 0;                       // of the CPU
  std::array<uint64_t, kQueueCount> scratch_bytes_of_queue{};  // of a GPU: blocks in this order
  int threads = 1;
  Device device = Device::cpu;

  // Bytes by role: state and persistent roles in full; activations, workspace and communication as
  // they stand at the operation where most transient bytes are live (plus scratch, as workspace,
  // and what fragmentation costs, as activations), so that the roles add up to device_bytes(). What
  // lies on the host is apart, and adds up to host_bytes().
  std::array<uint64_t, kRoleCount> bytes_by_role{};
  std::array<uint64_t, kRoleCount> host_bytes_by_role{};

  // By operation: transient bytes live while it runs, without those of the host.
  std::vector<uint64_t> live_bytes;
  uint64_t largest_live_bytes = 0;  // their maximum: no plan can do with less than this

  // Oracle plans only: the values whose last use is this operation, to be poisoned after it.
  std::vector<std::vector<ValueId>> dead_after;

  uint64_t scratch_bytes() const {
    return std::accumulate(scratch_bytes_of_queue.begin(), scratch_bytes_of_queue.end(),
                           scratch_bytes_per_thread * static_cast<uint64_t>(threads));
  }
  uint64_t device_bytes() const {
    return state_bytes + persistent_bytes + transient_bytes + scratch_bytes();
  }
  uint64_t host_bytes() const { return host_state_bytes + host_transient_bytes; }
  // What the memory of the device must hold, which on the CPU is that of the host.
  uint64_t total_bytes() const {
    return device_bytes() + (device == Device::cpu ? host_bytes() : 0);
  }
  // The same without the state, which programs share.
  uint64_t own_bytes() const {
    return total_bytes() - state_bytes - (device == Device::cpu ? host_state_bytes : 0);
  }
};

// Where values lie when all memory is in one row: state, persistent, transient, and the host's
// state and transient arenas.
struct Bytes {
  uint64_t begin = 0;
  uint64_t end = 0;
};
IdVector<ValueId, Bytes> bytes_of_values(const Program& program, const MemoryPlan& plan);

}  // namespace troupe
