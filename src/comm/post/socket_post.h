// The post over TCP: one connection between any two processes of the run, which found each other in
// a rendezvous (rendezvous.h).
//
// Everything is sent in frames. Those of messages are taken in whenever they come. A small transfer
// is sent at once, and kept by a receiver that does not expect it yet. A large one waits until its
// receiver has said that it expects it, and then goes from tensor to tensor in pieces, between
// which messages pass. So nothing that is sent ever waits for something that no rank takes, and
// what is kept is small.
//
// Lengths and numbers that come from another process are checked before they are used. One that
// sends what no rank of this build sends loses its connection, and the call throws a UserError that
// names it.
//
// A process whose connection is closed or broken is gone (next_gone()). There is no launcher that
// ends the others then: each ends when it has heard of it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/post/post.h"
#include "comm/post/rendezvous.h"

namespace troupe {

class SocketPost : public Post {
 public:
  // Transfers of more bytes than this wait for their receiver.
  static constexpr int64_t kSmallTransfer = 32 << 10;

  // What is read at a time; tests take less.
  static constexpr size_t kBuffer = 256 << 10;

  SocketPost(int rank, Connections connections, size_t buffer = kBuffer);
  ~SocketPost() override;

  void send_message(int to, std::string bytes) override;
  std::optional<Message> next_message() override;
  Transfer send(int to, int channel, std::span<const Block> blocks) override;
  Transfer receive(int from, int channel, std::span<const Block> blocks) override;
  bool done(Transfer transfer) override;
  void drop_transfers() override;
  std::optional<int32_t> next_gone() override;
  void finish() override;
  bool ends_all() const override { return false; }
  void abort(int status) override;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace troupe
