// TCP sockets, as far as ranks need them: one that closes itself, how to listen, and how to
// connect. None of them blocks when it is used, and no child process inherits one. Any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace troupe {

using SocketClock = std::chrono::steady_clock;

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  void reset();

 private:
  int descriptor_ = -1;
};

// A result, or why there is none.
struct SocketResult {
  Socket socket;
  std::string problem;  // "Connection refused"
};

// Listens on this port of all of the machine's addresses; 0: on one that the system chooses.
SocketResult listen_on(uint16_t port);
// Listens on this port of those addresses of the name that are the machine's own, and only there:
// on all of them, or, where one has the port taken, on none. No socket and no problem: none of the
// addresses is the machine's.
struct Listeners {
  std::vector<Socket> sockets;
  std::string problem;
};
Listeners listen_at(const std::string& address, uint16_t port);
// Listens, on a port that the system chooses, where this end of the connection is.
SocketResult listen_beside(const Socket& connection);
// The port that it listens on.
uint16_t port_of(const Socket& listener);
// The next connection that has come; none: problem is empty where there is none yet.
SocketResult accept_from(const Socket& listener);

// Connects to a host by its name or address, through one after the other of the addresses that the
// name has, until `end`.
SocketResult connect_to(const std::string& address, uint16_t port, SocketClock::time_point end);

// Where the two sides of a connection are: numeric addresses.
std::string own_address(const Socket& connection);
std::string address_of_peer(const Socket& connection);

// What the system says of an error number. Any thread.
std::string system_error(int code);
// Of those, one that only processes of the same machine can use.
bool is_loopback(const std::string& numeric_address);
// Is this one of the machine's own addresses, or a name of one?
bool is_of_this_machine(const std::string& address);
// Does the name stand, here, for nothing but addresses of that kind? (Debian gives a machine's own
// name such an address.)
bool means_loopback(const std::string& address);

// Sends or receives all of the bytes, until `end`. False: the other side has closed the connection,
// or time is over.
bool send_all(const Socket& connection, const void* bytes, size_t count,
              SocketClock::time_point end);
bool receive_all(const Socket& connection, void* bytes, size_t count, SocketClock::time_point end);

}  // namespace troupe
