#include "support/post_on_wire.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <utility>

namespace troupe::testing {

std::array<Socket, 2> make_wire() {
  std::array<int, 2> ends = {};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
  return {Socket(ends[0]), Socket(ends[1])};
}

std::unique_ptr<SocketPost> post_over(Socket wire, int rank, size_t buffer) {
  Connections connections{.sockets = {}, .machine_of_rank = {0, 0}};
  connections.sockets.resize(2);
  connections.sockets[static_cast<size_t>(1 - rank)] = std::move(wire);
  return std::make_unique<SocketPost>(rank, std::move(connections), buffer);
}

PostAndWire post_on_wire(int rank, size_t buffer) {
  std::array<Socket, 2> ends = make_wire();
  return {post_over(std::move(ends[0]), rank, buffer), std::move(ends[1])};
}

}  // namespace troupe::testing
