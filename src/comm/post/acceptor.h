// Accepts connections from all hosts and keeps those that say a Hello. Before that a connection
// gets a few hundred bytes of memory and a few seconds; their number is limited, and
// the oldest goes when another comes. So no number of strangers can use up the process's
// descriptors or memory, or hold up those who speak.
//
// One thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/post/handshake.h"
#include "comm/post/socket.h"

namespace troupe {

class Acceptor {
 public:
  static constexpr std::chrono::milliseconds kHelloLimit{5000};

  // Of `ranks` at most as many may come at the same time.
  Acceptor(const std::vector<Socket>& listeners, size_t ranks);

  // What is to be done with a connection; its nonce is that of the challenge that it was sent.
  using Enter = std::function<void(Socket, const Hello&, const Nonce&)>;
  // Calls enter() for every connection that has said a whole Hello of this protocol, and leave(i)
  // when inside[i] has closed or sent something, until done() or `end`. False: it is `end`.
  bool run(const std::vector<Socket>& inside, SocketClock::time_point end,
           const std::function<bool()>& done, const Enter& enter,
           const std::function<void(size_t)>& leave);

  // The connections that came and did not say it.
  int64_t strangers() const { return strangers_; }

 private:
  struct Pending {
    Socket connection;
    Nonce nonce = {};
    SocketClock::time_point end;
    std::array<std::byte, sizeof(Hello)> bytes = {};
    size_t count = 0;
  };

  void accept_all(const Socket& listener);
  void drop_oldest();
  void drop_late();
  // True: the connection is done with.
  bool read(Pending& pending, const Enter& enter);

  const std::vector<Socket>& listeners_;
  size_t most_pending_ = 0;
  std::vector<Pending> pending_;  // the oldest first
  int64_t strangers_ = 0;
};

}  // namespace troupe
