// Ranks as threads of one process.
//
// Ranks read and write each other's tensors in place; nothing is staged. Sums are taken in
// ascending order of ranks: every rank gets the same bits at any timing. What fails first is kept
// and is the cause: every member's call throws it.
//
// Members are used by one thread each; all other functions may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace troupe {

class ThreadGroup : public ProcessGroup {
 public:
  explicit ThreadGroup(int size, std::chrono::milliseconds limit = kCollectiveLimit);
  ~ThreadGroup() override;

  Communicator& member(int rank, const std::vector<int32_t>& members) override;
  using ProcessGroup::member;
  std::vector<uint64_t> exchange(int rank, uint64_t value) override;
  std::vector<std::string> gather(int rank, std::string bytes) override;

 private:
  class Room;
  // Each rank on a thread of its own. A rank that does not end after a failure, within twice the
  // limit, cannot be stopped from outside: the cause is printed and the process exits with the
  // status of a failure.
  void run(const std::function<void(int)>& body) override;
  // This rank will call nothing any more, until the next run().
  void leave(int rank);
  // The group's work is over because of `cause`, unless it was over before. Wakes all who wait.
  void fail(std::exception_ptr cause);
  void fail_locked(std::exception_ptr cause);
  // What failed first; null: nothing has.
  std::exception_ptr failure() const;
  Room& room_of(const std::vector<int32_t>& members);  // locked
  Room& room_of_all();

  // Guards everything below, and all that the rooms hold.
  mutable std::mutex mutex_;
  std::vector<bool> left_;  // by rank
  std::exception_ptr failure_;
  std::map<std::vector<int32_t>, std::unique_ptr<Room>> rooms_;  // by members
};

}  // namespace troupe
