// A process group: all ranks of a run, which compute together, as far as this process sees them.
//
// Every rank has a communicator for each set of ranks that it works with, through which the
// collectives of its programs run (Communicator). There are two kinds of group, with the same
// results to the bit: ranks as threads of one process (ThreadGroup), and ranks that are processes,
// on one host or several (PostGroup).
//
// Every wait for a rank is watched. One that does not come within the limit, has ended, has
// failed, or calls another collective (kind, group, dtypes or sizes) ends the work of all: each
// call throws one UserError that says which rank waited where, and for which ranks. The group
// cannot be used afterwards.
//
// A rank's functions are called by the thread that runs it. The group must outlive its use;
// tensors belong to the callers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "program/communicator.h"

namespace troupe {

// How long a rank waits for others in a collective before it gives up.
inline constexpr std::chrono::milliseconds kCollectiveLimit{10'000};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int size() const { return size_; }
  std::chrono::milliseconds limit() const { return limit_; }
  // The ranks that this process runs, and those that share the memory and the cores of its machine;
  // ascending.
  const std::vector<int32_t>& own_ranks() const { return own_ranks_; }
  const std::vector<int32_t>& ranks_of_machine() const { return ranks_of_machine_; }
  // By rank: the first rank of its machine.
  const std::vector<int32_t>& machine_of_rank() const { return machine_of_rank_; }

  // For messages: "rank 1", with host and process where ranks are processes.
  virtual std::string name_of_rank(int32_t rank) const;

  // The communicator of `rank`, one of this process, among `members`: ranks of this group,
  // ascending, `rank` among them. The same one whenever the members are the same. Owned by the
  // group.
  virtual Communicator& member(int rank, const std::vector<int32_t>& members) = 0;
  // Among all ranks.
  Communicator& member(int rank);

  // Outside of programs, between steps: hands each rank's number to all, by rank. The wait has no
  // limit, because one rank may be writing to a slow disk meanwhile; it ends when a rank fails.
  virtual std::vector<uint64_t> exchange(int rank, uint64_t value) = 0;
  // The same with bytes, of any number, which only rank 0 gets; the others get nothing.
  virtual std::vector<std::string> gather(int rank, std::string bytes) = 0;

 protected:
  ProcessGroup(std::chrono::milliseconds limit, std::vector<int32_t> own_ranks,
               std::vector<int32_t> machine_of_rank);

 private:
  friend void run_ranks(ProcessGroup& group, const std::function<void(int)>& body);
  virtual void run(const std::function<void(int)>& body) = 0;

  const int size_;
  const std::chrono::milliseconds limit_;
  const std::vector<int32_t> own_ranks_;
  const std::vector<int32_t> machine_of_rank_;
  std::vector<int32_t> ranks_of_machine_;
};

// Runs body(rank) for every rank of the group that is this process's, and returns when all ranks
// have ended, also those elsewhere. All processes must call it. What a body throws ends the work of
// all; the first failure is thrown again here. A rank that has returned calls nothing any more: who
// waits for it, or comes to, fails.
void run_ranks(ProcessGroup& group, const std::function<void(int)>& body);

// 0, 1, ..., size - 1.
std::vector<int32_t> ranks_below(int size);

}  // namespace troupe
