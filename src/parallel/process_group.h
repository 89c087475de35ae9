// A process group: several ranks, as threads of one process, that compute together.
//
// Every rank has a communicator for each set of ranks that it works with, through which the
// collectives of its programs run (Communicator). Ranks read and write each other's tensors in
// place; nothing is staged. Sums are taken in ascending order of ranks: every rank gets the same
// bits at any timing.
//
// Every wait for a rank is watched. One that does not come within the limit, has ended, has
// failed, or calls another collective (kind, group, dtypes or sizes) ends the work of all: each
// member's call throws one UserError (failed) that says who waited where, and for whom. What fails
// first is kept and is the cause; nothing can be done with the group afterwards.
//
// Owns no threads. Members are used by one thread each; all other functions may be called from any
// thread. The group must outlive its use; tensors belong to the callers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program/communicator.h"

namespace troupe {

// How long a rank waits for others in a collective before it gives up.
inline constexpr std::chrono::milliseconds kCollectiveLimit{10'000};

class ProcessGroup {
 public:
  explicit ProcessGroup(int size, std::chrono::milliseconds limit = kCollectiveLimit);
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int size() const { return size_; }
  std::chrono::milliseconds limit() const { return limit_; }

  // The communicator of `rank` among `members`: ranks of this group, ascending, `rank` among them.
  // The same one whenever the members are the same. Owned by the group.
  Communicator& member(int rank, const std::vector<int32_t>& members);
  // Among all ranks.
  Communicator& member(int rank);

  // Outside of programs, between steps: hands each rank's number to all, by rank. The wait has no
  // limit, because one rank may be writing to a slow disk meanwhile; it ends when a rank fails.
  std::vector<uint64_t> exchange(int rank, uint64_t value);

  // This rank will call nothing any more, until the next run_ranks(): who waits for it, or comes
  // to, fails.
  void leave(int rank);
  // Takes all ranks that left in again. None may be at work.
  void rejoin();
  // The group's work is over because of `cause`, unless it was over before. Wakes all who wait.
  void fail(std::exception_ptr cause);
  // What failed first; null: nothing has.
  std::exception_ptr failure() const;

 private:
  class Room;
  Room& room_of(const std::vector<int32_t>& members);  // locked
  void fail_locked(std::exception_ptr cause);

  const int size_;
  const std::chrono::milliseconds limit_;
  // Guards everything below, and all that the rooms hold.
  mutable std::mutex mutex_;
  std::vector<bool> left_;  // by rank
  std::exception_ptr failure_;
  std::map<std::vector<int32_t>, std::unique_ptr<Room>> rooms_;  // by members
};

// Runs body(rank) for every rank of the group, each on a thread of its own, and returns when all
// have ended. What a body throws ends the work of all; the first failure is thrown again here. A
// rank that does not end even then, twice the limit after the failure, cannot be stopped from
// outside: the cause is printed and the process exits with the status of a failure.
void run_ranks(ProcessGroup& group, const std::function<void(int)>& body);

}  // namespace troupe
