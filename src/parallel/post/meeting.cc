#include "parallel/post/meeting.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fstream>
#include <map>
#include <optional>
#include <poll.h>
#include <random>
#include <string_view>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "base/error.h"
#include "parallel/bytes.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;
using Time = SocketClock::time_point;

// What both sides must speak: another number when the messages change.
constexpr uint64_t kProtocol = 0x5452'4f55'5045'0001;
constexpr milliseconds kAnswerLimit{3000};

struct Hello {
  uint64_t protocol = kProtocol;
  uint64_t run = 0;
  uint64_t machine = 0;
  int32_t rank = 0;
  int32_t port = 0;  // where it listens
};

enum class AnswerKind : uint32_t { welcome, list, refusal };
struct Answer {
  uint64_t protocol = kProtocol;
  uint64_t run = 0;
  AnswerKind kind = AnswerKind::welcome;
  uint32_t bytes = 0;  // that follow
};

// Between two that have met the host.
struct Greeting {
  uint64_t protocol = kProtocol;
  std::array<uint64_t, 2> token = {};
  int64_t rank = 0;
};

struct Guest {
  std::string address;  // empty: on the host's machine
  int32_t port = 0;
  uint64_t machine = 0;
};

struct GuestList {
  std::array<uint64_t, 2> token = {};
  std::vector<Guest> guests;  // by rank
};

uint64_t fnv_hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// The same for processes that share memory: those of one host name on one booted kernel.
uint64_t machine_number() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fnv_hash(boot + " " + host.data());
}

std::string to_bytes(const GuestList& list) {
  std::string bytes;
  append_bytes(bytes, list.token);
  for (const Guest& guest : list.guests) {
    append_bytes(bytes, std::string_view(guest.address));
    append_bytes(bytes, guest.port);
    append_bytes(bytes, guest.machine);
  }
  return bytes;
}

GuestList list_from(std::string_view bytes) {
  ByteReader reader(bytes);
  GuestList list;
  list.token = reader.take<std::array<uint64_t, 2>>();
  while (!reader.at_end()) {
    Guest guest;
    guest.address = reader.take_text();
    guest.port = reader.take<int32_t>();
    guest.machine = reader.take<uint64_t>();
    list.guests.push_back(guest);
  }
  return list;
}

std::string seconds(milliseconds time) {
  return fmt::format("{} s", std::chrono::duration<double>(time).count());
}

// "rank 2", "ranks 2, 3, 4 and 60 others"
std::string names_of(const std::vector<int32_t>& ranks) {
  constexpr size_t kNamed = 8;
  const std::vector<int32_t> named(
      ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(std::min(ranks.size(), kNamed)));
  std::string text =
      fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(named, ", "));
  if (ranks.size() > kNamed) text += fmt::format(" and {} others", ranks.size() - kNamed);
  return text;
}

// Every connection takes a descriptor, of which processes may have few unless they ask.
void allow_many_descriptors() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Takes connections in, each with a first message of one type, until it is told to stop. Who sends
// none, or a wrong one, keeps nobody else waiting.
template <class First>
class Door {
 public:
  explicit Door(const Socket& listener) : listener_(listener) {}

  // Calls enter(connection, first) for every one that has come whole, and leave(place) for those of
  // `inside` that have closed, until done() or `end`. False: it is `end`.
  template <class Done, class Enter, class Leave>
  bool open(const std::vector<Socket>& inside, Time end, const Done& done, const Enter& enter,
            const Leave& leave) {
    while (!done()) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - SocketClock::now()).count();
      if (left < 0) return false;
      std::vector<pollfd> waiting = {entry(listener_)};
      for (const Visitor& visitor : visitors_) waiting.push_back(entry(visitor.connection));
      const size_t first_inside = waiting.size();
      for (const Socket& each : inside) waiting.push_back(entry(each));
      if (poll(waiting.data(), waiting.size(),
               static_cast<int>(std::min<int64_t>(left + 1, 1000))) <= 0) {
        continue;
      }
      for (size_t i = first_inside; i < waiting.size(); ++i) {
        if (waiting[i].revents != 0) leave(i - first_inside);
      }
      for (size_t i = first_inside; i-- > 1;) {
        if (waiting[i].revents != 0) read(i - 1, enter);
      }
      if (waiting[0].revents != 0) accept();
    }
    return true;
  }

 private:
  struct Visitor {
    Socket connection;
    std::array<std::byte, sizeof(First)> bytes = {};
    size_t count = 0;
  };

  static pollfd entry(const Socket& socket) {
    return {.fd = socket.descriptor(), .events = POLLIN, .revents = 0};
  }

  void accept() {
    SocketResult result = accept_from(listener_);
    if (!result.problem.empty()) throw_failed("Ranks cannot connect: " + result.problem + ".");
    if (result.socket) visitors_.push_back({.connection = std::move(result.socket)});
  }

  template <class Enter>
  void read(size_t place, const Enter& enter) {
    Visitor& visitor = visitors_[place];
    const ssize_t count =
        recv(visitor.connection.descriptor(), visitor.bytes.data() + visitor.count,
             sizeof(First) - visitor.count, 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count > 0) {
      visitor.count += static_cast<size_t>(count);
      if (visitor.count < sizeof(First)) return;
      First first;
      std::memcpy(&first, visitor.bytes.data(), sizeof(First));
      if (first.protocol == kProtocol) enter(std::move(visitor.connection), first);
    }
    visitors_.erase(visitors_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  const Socket& listener_;
  std::vector<Visitor> visitors_;
};

class Meeting {
 public:
  Meeting(const MeetingPlace& place, milliseconds limit)
      : place_(place),
        limit_(limit),
        end_(SocketClock::now() + limit),
        run_(fnv_hash(fmt::format("{} {} {}", place.run, place.size, kProtocol))),
        machine_(machine_number()) {
    SocketResult result = listen_on(0);
    if (!result.socket) throw_failed("Ranks cannot listen for each other: " + result.problem + ".");
    listener_ = std::move(result.socket);
  }

  GuestList find_others() {
    const bool hosts =
        place_.may_host && (!place_.hosts_only_at_address || is_of_this_machine(place_.address));
    milliseconds pause{20};
    while (SocketClock::now() < end_) {
      for (const uint16_t port : place_.ports) {
        if (hosts) {
          SocketResult result = listen_on(port);
          if (result.socket) return host(result.socket, port);
          problem_ = result.problem;
        }
        if (std::optional<GuestList> list = visit(port)) return std::move(*list);
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, milliseconds(500));
    }
    if (hosts) {
      throw_failed(fmt::format("Rank {} cannot listen on port {}, where all ranks are to meet: {}.",
                               place_.rank, place_.ports.front(), problem_));
    }
    throw_failed(fmt::format(
        "Rank {} of {} has found nobody at {}:{}, where all ranks are to meet, within {}: {}. The "
        "rank that is to be there has not started or has ended, or the address is not its own.",
        place_.rank, place_.size, place_.address, place_.ports.front(), seconds(limit_), problem_));
  }

  // All pairs: each connects to those below it.
  Connections connect_all(const GuestList& list) {
    const Time end = SocketClock::now() + limit_;
    Connections connections;
    connections.sockets.resize(list.guests.size());
    for (int32_t rank = 0; rank < place_.rank; ++rank) {
      connections.sockets[static_cast<size_t>(rank)] = connect_to_rank(list, rank, end);
    }
    accept_others(list, connections.sockets, end);
    std::map<uint64_t, int32_t> first_of_machine;
    for (int32_t rank = 0; rank < place_.size; ++rank) {
      const uint64_t machine = list.guests[static_cast<size_t>(rank)].machine;
      connections.machine_of_rank.push_back(
          first_of_machine.try_emplace(machine, rank).first->second);
    }
    return connections;
  }

 private:
  Answer answer(AnswerKind kind, std::string_view bytes) const {
    return {.protocol = kProtocol,
            .run = run_,
            .kind = kind,
            .bytes = static_cast<uint32_t>(bytes.size())};
  }

  void tell(const Socket& guest, AnswerKind kind, std::string_view bytes = {}) const {
    const Answer head = answer(kind, bytes);
    const Time end = SocketClock::now() + kAnswerLimit;
    if (send_all(guest, &head, sizeof(head), end)) send_all(guest, bytes.data(), bytes.size(), end);
  }

  GuestList host(const Socket& door, uint16_t port) {
    const auto size = static_cast<size_t>(place_.size);
    GuestList list;
    std::random_device random;
    for (uint64_t& word : list.token) word = uint64_t{random()} << 32 | random();
    list.guests.resize(size);
    list.guests[static_cast<size_t>(place_.rank)] = {
        .address = {}, .port = port_of(listener_), .machine = machine_};
    std::vector<Socket> inside(size);
    const auto absent = [&] {
      std::vector<int32_t> ranks;
      for (int32_t rank = 0; rank < place_.size; ++rank) {
        if (rank != place_.rank && !inside[static_cast<size_t>(rank)]) ranks.push_back(rank);
      }
      return ranks;
    };
    const bool all = Door<Hello>(door).open(
        inside, end_, [&] { return absent().empty(); },
        [&](Socket guest, const Hello& hello) {
          if (hello.run != run_ || hello.rank < 0 || hello.rank >= place_.size) return;
          const auto rank = static_cast<size_t>(hello.rank);
          if (inside[rank] || hello.rank == place_.rank) {
            return tell(guest, AnswerKind::refusal,
                        fmt::format("There is a rank {} already at {}:{}, where all ranks meet: "
                                    "each needs a number of its own.",
                                    hello.rank, place_.address, port));
          }
          std::string address = address_of_peer(guest);
          if (hello.machine == machine_ || is_loopback(address)) address.clear();
          list.guests[rank] = {.address = address, .port = hello.port, .machine = hello.machine};
          tell(guest, AnswerKind::welcome);
          inside[rank] = std::move(guest);
        },
        [&](size_t rank) { inside[rank].reset(); });
    if (!all) {
      for (const Socket& guest : inside) {
        if (guest) tell(guest, AnswerKind::refusal);
      }
      throw_failed(fmt::format(
          "Of {} ranks, {} did not come to {}:{}, where rank {} waited for them for {}: they have "
          "not started, cannot reach this address, or were told another one. No rank begins.",
          place_.size, names_of(absent()), place_.address, port, place_.rank, seconds(limit_)));
    }
    const std::string bytes = to_bytes(list);
    for (const Socket& guest : inside) {
      if (guest) tell(guest, AnswerKind::list, bytes);
    }
    return list;
  }

  // None: whoever listens there is not the host, or there is nobody.
  std::optional<GuestList> visit(uint16_t port) {
    const SocketResult result =
        connect_to(place_.address, port, std::min(end_, SocketClock::now() + kAnswerLimit));
    if (!result.socket) {
      problem_ = result.problem;
      return std::nullopt;
    }
    problem_ = "somebody else answers there";
    const Hello hello{.protocol = kProtocol,
                      .run = run_,
                      .machine = machine_,
                      .rank = place_.rank,
                      .port = port_of(listener_)};
    Time end = SocketClock::now() + kAnswerLimit;
    if (!send_all(result.socket, &hello, sizeof(hello), end)) return std::nullopt;
    for (;;) {
      Answer head;
      if (!receive_all(result.socket, &head, sizeof(head), end) || head.protocol != kProtocol ||
          head.run != run_) {
        return std::nullopt;
      }
      std::string bytes(head.bytes, '\0');
      if (!receive_all(result.socket, bytes.data(), bytes.size(), end)) return std::nullopt;
      if (head.kind == AnswerKind::list) return list_from(bytes);
      if (head.kind == AnswerKind::refusal) {
        throw UserError(bytes.empty() ? ExitStatus::failed : ExitStatus::bad_request, bytes);
      }
      problem_ = "who was there has ended";
      // The host gives up before.
      end = SocketClock::now() + limit_ + kAnswerLimit;
    }
  }

  Socket connect_to_rank(const GuestList& list, int32_t rank, Time end) {
    const Guest& guest = list.guests[static_cast<size_t>(rank)];
    const std::string& address = guest.address.empty() ? place_.address : guest.address;
    const auto port = static_cast<uint16_t>(guest.port);
    SocketResult result = connect_to(address, port, end);
    const Greeting greeting{.protocol = kProtocol, .token = list.token, .rank = place_.rank};
    if (result.socket && send_all(result.socket, &greeting, sizeof(greeting), end)) {
      return std::move(result.socket);
    }
    throw_failed(fmt::format(
        "Rank {} cannot connect to rank {} at {}:{}: {}. Ranks connect to each other on ports that "
        "the system chooses; firewalls between their machines must let them.",
        place_.rank, rank, address, port,
        result.problem.empty() ? "the connection was closed" : result.problem));
  }

  void accept_others(const GuestList& list, std::vector<Socket>& sockets, Time end) {
    const auto absent = [&] {
      std::vector<int32_t> ranks;
      for (int32_t rank = place_.rank + 1; rank < place_.size; ++rank) {
        if (!sockets[static_cast<size_t>(rank)]) ranks.push_back(rank);
      }
      return ranks;
    };
    const bool all = Door<Greeting>(listener_).open(
        {}, end, [&] { return absent().empty(); },
        [&](Socket connection, const Greeting& greeting) {
          if (greeting.token != list.token || greeting.rank <= place_.rank ||
              greeting.rank >= place_.size) {
            return;
          }
          sockets[static_cast<size_t>(greeting.rank)] = std::move(connection);
        },
        [](size_t) {});
    if (all) return;
    throw_failed(fmt::format(
        "{} did not connect to rank {} within {}, although all ranks have met at {}. Firewalls "
        "between their machines must let them.",
        names_of(absent()), place_.rank, seconds(limit_), place_.address));
  }

  const MeetingPlace& place_;
  const milliseconds limit_;
  const Time end_;
  const uint64_t run_;
  const uint64_t machine_;
  Socket listener_;
  std::string problem_ = "no time was left";
};

}  // namespace

Connections meet(const MeetingPlace& place, milliseconds limit) {
  allow_many_descriptors();
  Meeting meeting(place, limit);
  return meeting.connect_all(meeting.find_others());
}

}  // namespace troupe
