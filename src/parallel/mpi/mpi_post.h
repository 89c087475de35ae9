// Bytes between the processes that an MPI launcher has started: all that Troupe uses of MPI.
//
// Notes are small and need not be expected: whoever asks gets the next one, from anybody; those of
// one sender come in the order of sending. Transfers are tensors: they go straight from memory to
// memory, and between two processes those of one channel come in order. Nothing waits; the caller
// polls.
//
// One MpiPost per process and run of the program. Calls must not overlap; any thread may call.
// Every error of MPI is a UserError (failed).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "program/communicator.h"

namespace troupe {

class MpiPost {
 public:
  // Channels 0 to this number - 1; every MPI has as many.
  static constexpr int kChannels = 32'000;

  // What the MPI library calls itself. Needs no MpiPost.
  static std::string library();

  // Initialises MPI, which can be done once.
  MpiPost();
  // What is still under way is forgotten. MPI is left as it is: see finish() and abort().
  ~MpiPost();
  MpiPost(const MpiPost&) = delete;
  MpiPost& operator=(const MpiPost&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // By process: the first one of those that share its memory.
  const std::vector<int32_t>& machine_of_rank() const { return machine_of_rank_; }

  struct Note {
    int32_t from = 0;
    std::string bytes;
  };
  void send_note(int to, std::string bytes);
  std::optional<Note> next_note();

  // The blocks, one after the other. They stay as they are, or belong to the transfer, until it is
  // done. Sender and receiver may cut the same bytes into different blocks.
  using Transfer = size_t;
  Transfer send(int to, int channel, std::span<const Block> blocks);
  Transfer receive(int from, int channel, std::span<const Block> blocks);
  // Once it is true the transfer is over and must not be asked for again.
  bool done(Transfer transfer);

  // Ends MPI in this process; all processes must come here. Nothing can be sent any more.
  void finish();
  // Ends all processes at once with this status, this one too.
  [[noreturn]] void abort(int status);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int32_t> machine_of_rank_;
};

}  // namespace troupe
