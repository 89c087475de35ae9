#include "comm/post/socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string_view>
#include <sys/socket.h>
#include <unistd.h>

namespace troupe {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& address, uint16_t port, std::string& problem) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) problem = gai_strerror(code);
  return {code == 0 ? found : nullptr, &freeaddrinfo};
}

Socket new_socket(int family) {
  return Socket(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set(const Socket& socket, int level, int name, int value) {
  setsockopt(socket.descriptor(), level, name, &value, sizeof(value));
}

void set_up_connection(const Socket& connection) {
  set(connection, IPPROTO_TCP, TCP_NODELAY, 1);
  set(connection, SOL_SOCKET, SO_KEEPALIVE, 1);
}

// Waits until something can be done with the socket; false: not until `end`.
bool wait_until_ready(const Socket& socket, short events, SocketClock::time_point end) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(end - SocketClock::now()).count();
    if (left < 0) return false;
    pollfd waiting = {.fd = socket.descriptor(), .events = events, .revents = 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::min<int64_t>(left + 1, 60'000)));
    if (ready > 0) return true;
  }
}

bool is_for_later(int code) {
  return code == EAGAIN || code == EWOULDBLOCK || code == EINTR;
}

}  // namespace

std::string system_error(int code) {
  std::array<char, 128> text{};
  return strerror_r(code, text.data(), text.size());
}

void Socket::reset() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

SocketResult listen_on(uint16_t port) {
  sockaddr_in6 any6 = {};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(port);
  sockaddr_in any4 = {};
  any4.sin_family = AF_INET;
  any4.sin_port = htons(port);
  // A socket of version 6 serves both; a machine may have no version 6.
  Socket listener = new_socket(AF_INET6);
  if (listener) set(listener, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (!listener) listener = new_socket(AF_INET);
  if (!listener) return {{}, system_error(errno)};
  set(listener, SOL_SOCKET, SO_REUSEADDR, 1);
  int bound = bind(listener.descriptor(), reinterpret_cast<const sockaddr*>(&any6), sizeof(any6));
  if (bound != 0 && (errno == EADDRNOTAVAIL || errno == EINVAL || errno == EAFNOSUPPORT)) {
    listener = new_socket(AF_INET);
    set(listener, SOL_SOCKET, SO_REUSEADDR, 1);
    bound = bind(listener.descriptor(), reinterpret_cast<const sockaddr*>(&any4), sizeof(any4));
  }
  if (bound != 0 || listen(listener.descriptor(), SOMAXCONN) != 0) return {{}, system_error(errno)};
  return {std::move(listener), {}};
}

namespace {

// As listen_on(); the problem is left in errno.
Socket listen_at(const sockaddr* address, socklen_t size) {
  Socket listener = new_socket(address->sa_family);
  if (!listener) return {};
  set(listener, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) set(listener, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (bind(listener.descriptor(), address, size) != 0) return {};
  if (listen(listener.descriptor(), SOMAXCONN) != 0) return {};
  return listener;
}

}  // namespace

Listeners listen_at(const std::string& address, uint16_t port) {
  Listeners result;
  std::string unknown;  // then none of its addresses is the machine's
  const AddressList addresses = resolve(address, port, unknown);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    Socket listener = listen_at(each->ai_addr, each->ai_addrlen);
    if (listener) {
      result.sockets.push_back(std::move(listener));
    } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
      return {{}, system_error(errno)};
    }
  }
  return result;
}

SocketResult listen_beside(const Socket& connection) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(connection.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  // Both versions have the port in the same place.
  reinterpret_cast<sockaddr_in*>(&address)->sin_port = 0;
  Socket listener = listen_at(reinterpret_cast<const sockaddr*>(&address), size);
  if (!listener) return {{}, system_error(errno)};
  return {std::move(listener), {}};
}

uint16_t port_of(const Socket& listener) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(listener.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  // Both versions have the port in the same place.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

SocketResult accept_from(const Socket& listener) {
  Socket connection(accept4(listener.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection) {
    set_up_connection(connection);
    return {std::move(connection), {}};
  }
  const bool later = is_for_later(errno) || errno == ECONNABORTED;
  return {{}, later ? std::string() : system_error(errno)};
}

SocketResult connect_to(const std::string& address, uint16_t port, SocketClock::time_point end) {
  SocketResult result;
  const AddressList addresses = resolve(address, port, result.problem);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    Socket connection = new_socket(each->ai_family);
    if (!connection) {
      result.problem = system_error(errno);
      continue;
    }
    int code = 0;
    if (connect(connection.descriptor(), each->ai_addr, each->ai_addrlen) != 0) code = errno;
    if (code == EINPROGRESS) {
      code = ETIMEDOUT;
      if (wait_until_ready(connection, POLLOUT, end)) {
        socklen_t size = sizeof(code);
        getsockopt(connection.descriptor(), SOL_SOCKET, SO_ERROR, &code, &size);
      }
    }
    if (code == 0) {
      set_up_connection(connection);
      return {std::move(connection), {}};
    }
    result.problem = system_error(code);
  }
  return result;
}

namespace {

std::string numeric(const sockaddr_storage& address, socklen_t size) {
  std::array<char, NI_MAXHOST> text{};
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text.data(), text.size(), nullptr,
              0, NI_NUMERICHOST);
  // An address of version 4 as a socket of version 6 shows it.
  constexpr std::string_view kMapped = "::ffff:";
  const std::string_view view(text.data());
  return std::string(view.substr(0, kMapped.size()) == kMapped ? view.substr(kMapped.size())
                                                               : view);
}

}  // namespace

std::string own_address(const Socket& connection) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getsockname(connection.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return numeric(address, size);
}

std::string address_of_peer(const Socket& connection) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  getpeername(connection.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return numeric(address, size);
}

bool is_loopback(const std::string& numeric_address) {
  return numeric_address == "::1" || numeric_address.rfind("127.", 0) == 0;
}

bool is_of_this_machine(const std::string& address) {
  std::string problem;
  const AddressList addresses = resolve(address, 0, problem);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    const Socket trial = new_socket(each->ai_family);
    if (trial && bind(trial.descriptor(), each->ai_addr, each->ai_addrlen) == 0) return true;
  }
  return false;
}

bool means_loopback(const std::string& address) {
  std::string problem;
  const AddressList addresses = resolve(address, 0, problem);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    sockaddr_storage storage = {};
    std::memcpy(&storage, each->ai_addr, each->ai_addrlen);
    if (!is_loopback(numeric(storage, each->ai_addrlen))) return false;
  }
  return addresses != nullptr;
}

bool send_all(const Socket& connection, const void* bytes, size_t count,
              SocketClock::time_point end) {
  const auto* from = static_cast<const std::byte*>(bytes);
  while (count > 0) {
    const ssize_t sent = ::send(connection.descriptor(), from, count, MSG_NOSIGNAL);
    if (sent < 0 && !is_for_later(errno)) return false;
    if (sent < 0 && !wait_until_ready(connection, POLLOUT, end)) return false;
    if (sent <= 0) continue;
    from += sent;
    count -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(const Socket& connection, void* bytes, size_t count, SocketClock::time_point end) {
  auto* to = static_cast<std::byte*>(bytes);
  while (count > 0) {
    const ssize_t received = recv(connection.descriptor(), to, count, 0);
    if (received == 0 || (received < 0 && !is_for_later(errno))) return false;
    if (received < 0 && !wait_until_ready(connection, POLLIN, end)) return false;
    if (received < 0) continue;
    to += received;
    count -= static_cast<size_t>(received);
  }
  return true;
}

}  // namespace troupe
