#include "comm/post/rendezvous.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "comm/bytes.h"
#include "comm/post/acceptor.h"
#include "comm/post/handshake.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;
using Time = SocketClock::time_point;

constexpr milliseconds kAnswerLimit{3000};
constexpr int kConnectAttempts = 4;
constexpr size_t kLongestReason = 1000;

// One rank, as the list of all shows it.
struct Member {
  ShortText address = {};  // empty: on the server's machine
  ShortText host = {};
  uint64_t machine = 0;
  int32_t port = 0;
  int32_t process = 0;

  std::string to_string() const { return fmt::format("{}, process {}", text_of(host), process); }
};
static_assert(std::has_unique_object_representations_v<Member>);

struct MemberList {
  Nonce token = {};
  std::vector<Member> members;  // by rank
};

std::string host_name() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return host.data();
}

// The same for processes that share memory: those of one host name on one booted kernel.
uint64_t machine_number() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const Sha256 digest = sha256(boot + " " + host_name());
  uint64_t number = 0;
  std::memcpy(&number, digest.data(), sizeof(number));
  return number;
}

std::string to_bytes(const MemberList& list) {
  std::string bytes;
  append_bytes(bytes, list.token);
  for (const Member& member : list.members) append_bytes(bytes, member);
  return bytes;
}

size_t list_bytes(int ranks) {
  return sizeof(Nonce) + static_cast<size_t>(ranks) * sizeof(Member);
}

// The bytes are as many as they must be.
MemberList list_from(std::string_view bytes) {
  ByteReader reader(bytes);
  MemberList list;
  list.token = reader.take<Nonce>();
  while (!reader.at_end()) list.members.push_back(reader.take<Member>());
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

class Rendezvous {
 public:
  Rendezvous(const RendezvousPoint& point, milliseconds limit)
      : point_(point),
        limit_(limit),
        end_(SocketClock::now() + limit),
        key_(point.secret, point.run) {
    own_.host = short_text(host_name());
    own_.machine = machine_number();
    own_.process = static_cast<int32_t>(getpid());
  }

  MemberList find_others() {
    const bool serves =
        point_.may_serve && (!point_.serves_only_at_address || is_of_this_machine(point_.address));
    milliseconds pause{20};
    while (SocketClock::now() < end_) {
      for (const uint16_t port : point_.ports) {
        if (serves) {
          listeners_ = listen_for_all(port);
          if (!listeners_.empty()) return serve(port);
          if (!point_.serves_only_at_address) continue;  // no other rank does
        }
        if (std::optional<MemberList> list = visit(port)) return std::move(*list);
      }
      if (serves && !point_.serves_only_at_address) refuse_port();
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, milliseconds(500));
    }
    throw_failed(fmt::format(
        "Rank {} of {} ({}) has not found the rank that listens for all at {}:{} within {} "
        "(--rendezvous-timeout-s): {}. That rank has not started or has ended, or the address is "
        "not its own.",
        point_.rank, point_.size, own_.to_string(), point_.address, point_.ports.front(),
        seconds(limit_), answer_.empty() ? problem_ : answer_));
  }

  // All pairs: each connects to those below it.
  Connections connect_all(const MemberList& list) {
    const Time end = SocketClock::now() + limit_;
    const HandshakeKey key = key_.with_token(list.token);
    Connections connections;
    connections.sockets.resize(list.members.size());
    for (int32_t rank = 0; rank < point_.rank; ++rank) {
      connections.sockets[static_cast<size_t>(rank)] = connect_to_rank(list, rank, key, end);
    }
    accept_others(key, connections.sockets, end);
    std::map<uint64_t, int32_t> first_of_machine;
    for (int32_t rank = 0; rank < point_.size; ++rank) {
      const Member& member = list.members[static_cast<size_t>(rank)];
      connections.machine_of_rank.push_back(
          first_of_machine.try_emplace(member.machine, rank).first->second);
      connections.process_of_rank.push_back(member.to_string());
    }
    return connections;
  }

 private:
  bool is_at_loopback() const {
    return point_.is_on_one_machine || point_.address == "localhost" || is_loopback(point_.address);
  }

  // Where the ranks come to. None: the port is taken. On all addresses only where the machine
  // cannot tell which one the others mean: it knows the name as one of the loopback, or not as its
  // own.
  std::vector<Socket> listen_for_all(uint16_t port) {
    if (is_at_loopback() || !means_loopback(point_.address)) {
      Listeners listeners = listen_at(point_.address, port);
      problem_ = listeners.problem;
      if (!problem_.empty() || !listeners.sockets.empty()) return std::move(listeners.sockets);
    }
    SocketResult result = listen_on(port);
    problem_ = result.problem;
    std::vector<Socket> sockets;
    if (result.socket) sockets.push_back(std::move(result.socket));
    return sockets;
  }

  // For the ranks above this one.
  void listen_at_this_end(const Socket& connection) {
    const bool is_known = is_at_loopback() || !is_loopback(own_address(connection));
    SocketResult result = is_known ? listen_beside(connection) : listen_on(0);
    if (!result.socket) throw_failed("Ranks cannot listen for each other: " + result.problem + ".");
    listeners_.clear();
    listeners_.push_back(std::move(result.socket));
    own_.port = port_of(listeners_.front());
  }

  [[noreturn]] void refuse_port() const {
    const bool is_one = point_.ports.size() == 1;
    throw_failed(fmt::format(
        "Rank {} ({}) cannot listen on port {} of {}, where the ranks find each other: {}. {}",
        point_.rank, own_.to_string(), fmt::join(point_.ports, ", "), point_.address, problem_,
        is_one ? "Another program has the port, perhaps a run that has not ended: choose another "
                 "MASTER_PORT."
               : "Other programs have these ports, perhaps runs that have not ended."));
  }

  void tell(const Socket& member, const Answer& answer, std::string_view bytes = {}) const {
    const Time end = SocketClock::now() + kAnswerLimit;
    if (send_all(member, &answer, sizeof(answer), end)) {
      send_all(member, bytes.data(), bytes.size(), end);
    }
  }

  // A rank that has come to the server.
  struct Joined {
    Nonce challenge = {};
    Nonce nonce = {};
  };

  void tell(size_t rank, AnswerKind kind, std::string_view bytes = {}) const {
    if (!inside_[rank]) return;
    const Joined& joined = joined_[rank];
    tell(inside_[rank], key_.answer(kind, bytes, joined.challenge, joined.nonce), bytes);
  }

  [[noreturn]] void end_all(ExitStatus status, const std::string& message) const {
    for (size_t rank = 0; rank < inside_.size(); ++rank) tell(rank, AnswerKind::refusal);
    throw UserError(status, message);
  }

  std::vector<int32_t> absent(const std::vector<Socket>& sockets, int32_t from) const {
    std::vector<int32_t> ranks;
    for (int32_t rank = from; rank < point_.size; ++rank) {
      if (rank != point_.rank && !sockets[static_cast<size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

  MemberList serve(uint16_t port) {
    const auto size = static_cast<size_t>(point_.size);
    own_.port = port;
    MemberList list{.token = random_nonce(), .members = std::vector<Member>(size)};
    list.members[static_cast<size_t>(point_.rank)] = own_;
    inside_.resize(size);
    joined_.resize(size);
    Acceptor acceptor(listeners_, size);
    const bool all = acceptor.run(
        inside_, end_, [&] { return absent(inside_, 0).empty(); },
        [&](Socket connection, const Hello& hello, const Nonce& challenge) {
          let_in(list, std::move(connection), hello, challenge);
        },
        [&](size_t rank) { inside_[rank].reset(); });
    if (!all) {
      std::string strangers;
      if (others_ > 0) {
        strangers = fmt::format(" {} {} from {} had another secret or were of another run.",
                                others_, others_ == 1 ? "connection" : "connections", last_other_);
      }
      end_all(ExitStatus::failed,
              fmt::format("Of {} ranks, {} did not come to {}:{}, where rank {} ({}) waited for "
                          "them for {} (--rendezvous-timeout-s): they have not started, cannot "
                          "reach this address, or were told another one.{} No rank begins.",
                          point_.size, names_of(absent(inside_, 0)), point_.address, port,
                          point_.rank, own_.to_string(), seconds(limit_), strangers));
    }
    const std::string bytes = to_bytes(list);
    for (size_t rank = 0; rank < size; ++rank) tell(rank, AnswerKind::members, bytes);
    return list;
  }

  void let_in(MemberList& list, Socket connection, const Hello& hello, const Nonce& challenge) {
    const bool is_of_run = hello.run == key_.run();
    if (!is_of_run || !key_.has_signed(hello, challenge)) {
      ++others_;
      last_other_ = address_of_peer(connection);
      const Answer answer{.kind = is_of_run ? AnswerKind::other_secret : AnswerKind::other_run,
                          .digest = {},
                          .signature = {}};
      return tell(connection, answer);
    }
    std::string address = address_of_peer(connection);
    if (hello.machine == own_.machine || is_loopback(address)) address.clear();
    const Member member{.address = short_text(address),
                        .host = hello.host,
                        .machine = hello.machine,
                        .port = hello.port,
                        .process = hello.process};
    const auto refuse = [&](const std::string& reason) {
      tell(connection, key_.answer(AnswerKind::refusal, reason, challenge, hello.nonce), reason);
    };
    if (hello.size != point_.size) {
      refuse("");
      end_all(ExitStatus::bad_request,
              fmt::format("Rank {} ({}) was started as one of {} ranks, rank {} ({}) as one of {}. "
                          "Give all ranks the same number (WORLD_SIZE). No rank begins.",
                          hello.rank, member.to_string(), hello.size, point_.rank, own_.to_string(),
                          point_.size));
    }
    if (hello.purpose != Purpose::join || hello.rank < 0 || hello.rank >= point_.size) return;
    const auto rank = static_cast<size_t>(hello.rank);
    if (inside_[rank] || hello.rank == point_.rank) {
      return refuse(
          fmt::format("There is a rank {} already ({}): this one ({}) needs a number of "
                      "its own (RANK).",
                      hello.rank, list.members[rank].to_string(), member.to_string()));
    }
    list.members[rank] = member;
    inside_[rank] = std::move(connection);
    joined_[rank] = {.challenge = challenge, .nonce = hello.nonce};
    tell(rank, AnswerKind::welcome);
  }

  // None: what listens there is not the server, or nothing does.
  std::optional<MemberList> visit(uint16_t port) {
    const Time end = std::min(end_, SocketClock::now() + kAnswerLimit);
    const SocketResult result = connect_to(point_.address, port, end);
    if (!result.socket) {
      problem_ = result.problem;
      return std::nullopt;
    }
    answer_ = "somebody else answers there";
    Challenge challenge;
    if (!receive_all(result.socket, &challenge, sizeof(challenge), end)) return std::nullopt;
    if (challenge.protocol != kProtocol) {
      if ((challenge.protocol & kProgramMask) == (kProtocol & kProgramMask)) {
        answer_ = "another version of Troupe answers there";
      }
      return std::nullopt;
    }
    listen_at_this_end(result.socket);
    Hello hello = hello_for(Purpose::join);
    key_.sign(hello, challenge.nonce);
    if (!send_all(result.socket, &hello, sizeof(hello), end)) return std::nullopt;
    return wait_for_list(result.socket, challenge.nonce, hello.nonce, end);
  }

  Hello hello_for(Purpose purpose, int32_t to = -1) const {
    return {.protocol = kProtocol,
            .run = key_.run(),
            .nonce = random_nonce(),
            .purpose = purpose,
            .rank = point_.rank,
            .size = point_.size,
            .port = own_.port,
            .process = own_.process,
            .to = to,
            .machine = own_.machine,
            .host = own_.host,
            .signature = {}};
  }

  std::optional<MemberList> wait_for_list(const Socket& server, const Nonce& challenge,
                                          const Nonce& hello, Time end) {
    for (;;) {
      Answer answer;
      if (!receive_all(server, &answer, sizeof(answer), end)) return std::nullopt;
      if (answer.kind == AnswerKind::other_run) {
        answer_ =
            "a rank of another run answers there (is MASTER_ADDR the same for all ranks, to "
            "the letter?)";
        return std::nullopt;
      }
      if (answer.kind == AnswerKind::other_secret) refuse_secret();
      if (!key_.has_signed(answer, challenge, hello)) return std::nullopt;
      const size_t longest = std::max<size_t>(list_bytes(point_.size), 4096);
      if (answer.bytes > longest) return std::nullopt;
      std::string bytes(answer.bytes, '\0');
      if (!receive_all(server, bytes.data(), bytes.size(), end) ||
          !same_in_constant_time(sha256(bytes), answer.digest)) {
        return std::nullopt;
      }
      if (answer.kind == AnswerKind::refusal) {
        throw UserError(bytes.empty() ? ExitStatus::failed : ExitStatus::bad_request,
                        printable(bytes, kLongestReason));
      }
      if (answer.kind == AnswerKind::members) {
        if (bytes.size() != list_bytes(point_.size)) return std::nullopt;
        return list_from(bytes);
      }
      answer_ = "the rank that was there has ended";
      // The server gives up before.
      end = SocketClock::now() + limit_ + kAnswerLimit;
    }
  }

  [[noreturn]] void refuse_secret() const {
    throw_failed(fmt::format(
        "Rank {} ({}) has another secret than the rank that listens at {}, or only one of them has "
        "one. Give all ranks the same --rendezvous-secret-file FILE or TROUPE_RENDEZVOUS_SECRET.",
        point_.rank, own_.to_string(), point_.address));
  }

  Socket connect_to_rank(const MemberList& list, int32_t rank, const HandshakeKey& key, Time end) {
    const Member& member = list.members[static_cast<size_t>(rank)];
    const std::string own_machine = text_of(member.address);
    const std::string& address = own_machine.empty() ? point_.address : own_machine;
    std::string problem;
    for (int attempt = 0; attempt < kConnectAttempts && SocketClock::now() < end; ++attempt) {
      SocketResult result = connect_to(address, static_cast<uint16_t>(member.port), end);
      problem = result.problem;
      if (!result.socket) break;
      if (is_welcome(result.socket, rank, key, end)) return std::move(result.socket);
      problem = "the connection was closed";
    }
    throw_failed(fmt::format(
        "Rank {} ({}) cannot connect to rank {} ({}) at {}:{}: {}. Ranks connect to each other on "
        "ports that the system chooses; firewalls between their machines must let them.",
        point_.rank, own_.to_string(), rank, member.to_string(), address, member.port, problem));
  }

  bool is_welcome(const Socket& connection, int32_t to, const HandshakeKey& key, Time end) const {
    Challenge challenge;
    if (!receive_all(connection, &challenge, sizeof(challenge), end)) return false;
    Hello hello = hello_for(Purpose::connect, to);
    key.sign(hello, challenge.nonce);
    Answer answer;
    return challenge.protocol == kProtocol && send_all(connection, &hello, sizeof(hello), end) &&
           receive_all(connection, &answer, sizeof(answer), end) &&
           answer.kind == AnswerKind::welcome && answer.bytes == 0 &&
           key.has_signed(answer, challenge.nonce, hello.nonce);
  }

  void accept_others(const HandshakeKey& key, std::vector<Socket>& sockets, Time end) {
    Acceptor acceptor(listeners_, sockets.size());
    const bool all = acceptor.run(
        {}, end, [&] { return absent(sockets, point_.rank + 1).empty(); },
        [&](Socket connection, const Hello& hello, const Nonce& challenge) {
          if (hello.purpose != Purpose::connect || hello.to != point_.rank ||
              hello.rank <= point_.rank || hello.rank >= point_.size ||
              !key.has_signed(hello, challenge)) {
            return;
          }
          tell(connection, key.answer(AnswerKind::welcome, {}, challenge, hello.nonce));
          sockets[static_cast<size_t>(hello.rank)] = std::move(connection);
        },
        [](size_t) {});
    if (all) return;
    throw_failed(fmt::format(
        "{} did not connect to rank {} ({}) within {} (--rendezvous-timeout-s), although all ranks "
        "have come to {}. Firewalls between their machines must let them.",
        names_of(absent(sockets, point_.rank + 1)), point_.rank, own_.to_string(), seconds(limit_),
        point_.address));
  }

  const RendezvousPoint& point_;
  const milliseconds limit_;
  const Time end_;
  const HandshakeKey key_;
  Member own_;
  std::vector<Socket> listeners_;
  // Of the server: the ranks that have come.
  std::vector<Socket> inside_;
  std::vector<Joined> joined_;
  int64_t others_ = 0;  // connections that cannot be of this run
  std::string last_other_;
  std::string problem_ = "no time was left";
  std::string answer_;  // of what was there; empty: nothing was
};

}  // namespace

Connections connect_ranks(const RendezvousPoint& point, milliseconds limit) {
  allow_many_descriptors();
  Rendezvous rendezvous(point, limit);
  return rendezvous.connect_all(rendezvous.find_others());
}

}  // namespace troupe
