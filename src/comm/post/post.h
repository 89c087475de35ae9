// Bytes between the processes of a run, one rank each: what ranks as processes need, whatever
// carries it (MpiPost, SocketPost).
//
// Messages are small and need not be expected: a call gets the next one, from any rank; those
// of one sender come in the order of sending. Transfers are tensors: they go straight from memory
// to memory, and between two processes those of one channel come in order. Nothing waits; the
// caller polls, and what is under way goes on while it does.
//
// One Post per process and run of the program. Calls must not overlap; any thread may call. Errors
// of what carries the bytes, and bytes that no rank of this build sends, are UserErrors (failed).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "program/communicator.h"

namespace troupe {

class Post {
 public:
  // Channels 0 to this number - 1; every MPI has as many.
  static constexpr int kChannels = 32'000;

  // What is still under way is forgotten.
  virtual ~Post() = default;
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // By process: the first one of those that share its memory.
  const std::vector<int32_t>& machine_of_rank() const { return machine_of_rank_; }

  // By rank, where its process runs: "node1, process 4711".
  const std::vector<std::string>& process_of_rank() const { return process_of_rank_; }

  struct Message {
    int32_t from = 0;
    std::string bytes;
  };
  static constexpr int64_t kLongestMessage = int64_t{16} << 20;
  virtual void send_message(int to, std::string bytes) = 0;
  virtual std::optional<Message> next_message() = 0;

  // The blocks, one after the other. They stay as they are, or belong to the transfer, until it is
  // done. Sender and receiver may cut the same bytes into different blocks.
  using Transfer = size_t;
  virtual Transfer send(int to, int channel, std::span<const Block> blocks) = 0;
  virtual Transfer receive(int from, int channel, std::span<const Block> blocks) = 0;
  // Once it is true the transfer is over and must not be asked for again.
  virtual bool done(Transfer transfer) = 0;
  // From now on no transfer is ever done. Unless MPI works on them, their memory is free.
  virtual void drop_transfers() {}

  // The next process that nothing can come from any more, each once, after its last message; none
  // where the launcher ends all when one is gone.
  virtual std::optional<int32_t> next_gone() { return std::nullopt; }

  // Ends the exchange; all processes must come here. Nothing can be sent any more.
  virtual void finish() = 0;
  // Does abort() end all processes by force? If not, the others find this one gone.
  virtual bool ends_all() const = 0;
  // The process is about to exit with this status: sees that the others have its messages, or ends
  // them, and this one, at once.
  virtual void abort(int status) = 0;

 protected:
  Post() = default;
  void set_place(int rank, std::vector<int32_t> machine_of_rank,
                 std::vector<std::string> process_of_rank) {
    rank_ = rank;
    size_ = static_cast<int>(machine_of_rank.size());
    machine_of_rank_ = std::move(machine_of_rank);
    process_of_rank_ = std::move(process_of_rank);
  }

 private:
  int rank_ = 0;
  int size_ = 1;
  std::vector<int32_t> machine_of_rank_;
  std::vector<std::string> process_of_rank_;
};

}  // namespace troupe
