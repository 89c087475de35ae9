#include "comm/post/acceptor.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>

namespace troupe {
namespace {

using std::chrono::milliseconds;

constexpr size_t kFewestPending = 64;
constexpr int kAcceptedAtOnce = 64;
constexpr int kLongestPoll = 500;  // ms, after which late ones are dropped

pollfd entry(const Socket& socket) {
  return {.fd = socket.descriptor(), .events = POLLIN, .revents = 0};
}

}  // namespace

// Half of the descriptors stay for those who are let in.
Acceptor::Acceptor(const std::vector<Socket>& listeners, size_t ranks) : listeners_(listeners) {
  rlimit limit = {};
  size_t descriptors = 64;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) descriptors = static_cast<size_t>(limit.rlim_cur);
  most_pending_ = std::clamp<size_t>(descriptors / 2, 1, std::max(kFewestPending, 2 * ranks));
}

bool Acceptor::run(const std::vector<Socket>& inside, SocketClock::time_point end,
                   const std::function<bool()>& done, const Enter& enter,
                   const std::function<void(size_t)>& leave) {
  while (!done()) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - SocketClock::now()).count();
    if (left < 0) return false;
    drop_late();
    std::vector<pollfd> waiting;
    for (const Socket& listener : listeners_) waiting.push_back(entry(listener));
    for (const Pending& each : pending_) waiting.push_back(entry(each.connection));
    const size_t first_pending = listeners_.size();
    const size_t first_inside = waiting.size();
    for (const Socket& each : inside) waiting.push_back(entry(each));
    const int ready = poll(waiting.data(), waiting.size(),
                           static_cast<int>(std::min<int64_t>(left + 1, kLongestPoll)));
    if (ready <= 0) continue;
    for (size_t i = first_inside; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) leave(i - first_inside);
    }
    for (size_t i = first_inside; i-- > first_pending;) {
      if (waiting[i].revents == 0) continue;
      const auto at = pending_.begin() + static_cast<std::ptrdiff_t>(i - first_pending);
      if (read(*at, enter)) pending_.erase(at);
    }
    for (size_t i = 0; i < first_pending; ++i) {
      if (waiting[i].revents != 0) accept_all(listeners_[i]);
    }
  }
  return true;
}

void Acceptor::accept_all(const Socket& listener) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    if (pending_.size() >= most_pending_) drop_oldest();
    SocketResult result = accept_from(listener);
    if (!result.socket) {
      if (result.problem.empty()) return;
      // Descriptors are short: somebody must go, or is to be waited for.
      if (pending_.empty()) std::this_thread::sleep_for(milliseconds(10));
      drop_oldest();
      return;
    }
    Pending& pending = pending_.emplace_back();
    pending.connection = std::move(result.socket);
    pending.nonce = random_nonce();
    pending.end = SocketClock::now() + kHelloLimit;
    // It fits into the buffer of a new connection; who does not get it is not worth a wait.
    const Challenge challenge{.protocol = kProtocol, .nonce = pending.nonce};
    [[maybe_unused]] const ssize_t sent =
        send(pending.connection.descriptor(), &challenge, sizeof(challenge), MSG_NOSIGNAL);
  }
}

void Acceptor::drop_oldest() {
  if (pending_.empty()) return;
  ++strangers_;
  pending_.erase(pending_.begin());
}

void Acceptor::drop_late() {
  const auto now = SocketClock::now();
  while (!pending_.empty() && pending_.front().end < now) drop_oldest();
}

bool Acceptor::read(Pending& pending, const Enter& enter) {
  const ssize_t count = recv(pending.connection.descriptor(), pending.bytes.data() + pending.count,
                             sizeof(Hello) - pending.count, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count > 0) {
    pending.count += static_cast<size_t>(count);
    if (pending.count < sizeof(Hello)) return false;
    Hello hello;
    std::memcpy(&hello, pending.bytes.data(), sizeof(Hello));
    if (hello.protocol == kProtocol) {
      enter(std::move(pending.connection), hello, pending.nonce);
      return true;
    }
  }
  ++strangers_;
  return true;
}

}  // namespace troupe
