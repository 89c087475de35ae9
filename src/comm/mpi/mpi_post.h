// The post between processes that an MPI launcher has started: all that Troupe uses of MPI. Part of
// a library of its own for each kind of MPI (comm/mpi_library.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/post/post.h"

namespace troupe {

class MpiPost : public Post {
 public:
  // What the MPI library calls itself. Needs no MpiPost.
  static std::string library();

  // Initialises MPI, which can be done once.
  MpiPost();
  // MPI is left as it is: see finish() and abort().
  ~MpiPost() override;

  void send_message(int to, std::string bytes) override;
  std::optional<Message> next_message() override;
  Transfer send(int to, int channel, std::span<const Block> blocks) override;
  Transfer receive(int from, int channel, std::span<const Block> blocks) override;
  bool done(Transfer transfer) override;
  void finish() override;
  bool ends_all() const override { return true; }
  void abort(int status) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace troupe
