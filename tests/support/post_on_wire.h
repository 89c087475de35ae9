// One of two ranks on a connection whose other end a test holds, or the other rank.
#pragma once

#include <array>
#include <memory>

#include "comm/post/socket_post.h"

namespace troupe::testing {

// Both ends of a connection.
std::array<Socket, 2> make_wire();

// The post of rank 0 or 1, whose connection to the other rank this is.
std::unique_ptr<SocketPost> post_over(Socket wire, int rank, size_t buffer = SocketPost::kBuffer);

// That post, and the other end of its connection.
struct PostAndWire {
  std::unique_ptr<SocketPost> post;
  Socket wire;
};
PostAndWire post_on_wire(int rank, size_t buffer = SocketPost::kBuffer);

}  // namespace troupe::testing
