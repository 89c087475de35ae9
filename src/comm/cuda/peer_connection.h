// The GPUs of a program's ranks, connected: for each operation that reaches other ranks, where
// their operands lie (comm/cuda/peers.h).
//
// GPUs of one process map each other's memory by peer access, those of several processes of one
// machine by CUDA's handles; several ranks may share a GPU. connect() exchanges the addresses once,
// by way of the ranks' communicators on the host; after it the host has no part in what operations
// exchange. Holds a few KiB on the GPU for flags, beside the memory plan.
//
// Groups that the program calls staged (Program::staged_groups) get communicators of NCCL instead
// (comm/cuda/nccl_group.h), which take memory of the GPU for themselves.
//
// One thread at a time. Errors are UserErrors: GPUs that cannot reach each other, ranks on several
// machines, groups of too many ranks; and in wait() a rank that did not come in time.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/cuda/nccl_group.h"
#include "comm/cuda/peers.h"
#include "program/communicator.h"
#include "program/program.h"

namespace troupe {

// Memory of this rank in which operands lie: all of an allocation.
struct PeerMemory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

class PeerConnection {
 public:
  // On the GPU that the calling thread uses. Does the program reach other ranks?
  static bool is_needed(const Program& program);
  PeerConnection(const Program& program, const Communicators& communicators,
                 std::vector<PeerMemory> memory);
  ~PeerConnection();
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  // All ranks must call it at the same time, before their first run. arguments[i]: of operation i
  // of the program; their `peers` are set, good as long as this object.
  void connect(std::span<CudaKernelArguments* const> arguments, ThreadPool& pool);

  // Until the stream has done all that it was given in a run. Throws if the GPU's wait for another
  // rank has timed out; `what` was being done if it has failed.
  void wait(CUstream_st* stream, const std::string& what);

  // The first run is over: from now on GPUs wait for each other, and hosts do not.
  void first_run_is_over() { waits_on_host_ = false; }
  // Waits for the hosts of all ranks with which this one has to do. All must call it.
  void barrier_on_host(ThreadPool& pool) const;

 private:
  struct Greeting;
  struct Group;

  // What operations know of a group's members.
  void connect_group(RankGroup kind, std::span<CudaKernelArguments* const> arguments,
                     ThreadPool& pool);
  // Those of all staged kinds of groups that consist of the same ranks.
  void connect_staged(Communicator& communicator, std::span<CudaKernelArguments* const> arguments,
                      ThreadPool& pool);
  bool is_staged(RankGroup kind) const {
    return program_.staged_groups()[static_cast<size_t>(kind)] > 0;
  }
  // Throws if the GPU has waited for too long in an operation that another rank takes part in.
  void check_progress(int32_t index, std::chrono::nanoseconds waited) const;
  // Throws if a GPU's wait for a flag has timed out.
  void check_flags() const;
  // Until `query` says anything but cudaErrorNotReady, while NCCL is watched. Throws if the GPU
  // waits for another rank for too long, or NCCL has failed.
  int watch(const std::function<int()>& query);
  void open_memory(const Greeting& own, Group& group) const;
  int64_t encode(const void* address) const;

  const Program& program_;
  const Communicators communicators_;
  std::vector<PeerMemory> memory_;  // the boards, then what the interpreter gave
  std::unique_ptr<PeerFault, void (*)(PeerFault*)> fault_;
  // What the GPU waits in, in staged groups: an operation. Memory of the host.
  std::unique_ptr<int32_t, void (*)(int32_t*)> progress_;
  bool waits_on_host_ = true;
  std::unique_ptr<NcclPace> pace_;
  std::vector<std::unique_ptr<NcclGroup>> nccl_;
  std::vector<std::unique_ptr<CudaPeers>> peers_;
  mutable std::vector<void*> opened_;  // memory of other processes
};

}  // namespace troupe
