// A rank to which somebody else speaks over a connection. The first byte of the input says which
// part of the rank hears the rest:
//   who accepts connections: the start of a handshake, from a stranger
//   who waits for the list of ranks: what a server says, signed or not
//   the post: frames, from another rank
//   the group: announcements, from another rank
#include <array>
#include <cstring>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/error.h"
#include "comm/bytes.h"
#include "comm/post/acceptor.h"
#include "comm/post/handshake.h"
#include "comm/post/post_group.h"
#include "comm/post/rendezvous.h"
#include "comm/post/socket_post.h"
#include "harness.h"

namespace troupe::fuzz {
namespace {

constexpr std::string_view kSecret = "a secret of the fuzz target";
constexpr std::string_view kRun = "fuzz";
enum class Part : unsigned char { acceptor, post, group, list, signed_list };

// Another rank's failure may have several lines.
void check_lines(std::string_view message) {
  for (const char c : message) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') {
      report_finding("a message with a control character");
    }
  }
}

void send_and_close(Socket connection, std::string_view bytes) {
  send_all(connection, bytes.data(), bytes.size(),
           SocketClock::now() + std::chrono::milliseconds(500));
}

// What does not know the secret must never come in.
void hear_stranger(std::string_view input) {
  static const std::vector<Socket> listeners = [] {
    std::vector<Socket> sockets = std::move(listen_at("127.0.0.1", 0).sockets);
    if (sockets.empty()) report_finding("cannot listen on 127.0.0.1");
    return sockets;
  }();
  static const HandshakeKey key(kSecret, kRun);
  const auto end = SocketClock::now() + std::chrono::seconds(2);
  send_and_close(connect_to("127.0.0.1", port_of(listeners.front()), end).socket, input);
  Acceptor acceptor(listeners, 4);
  bool is_heard = false;
  acceptor.run(
      {}, end, [&] { return is_heard || acceptor.strangers() > 0; },
      [&](const Socket& connection, const Hello& hello, const Nonce& nonce) {
        is_heard = true;
        if (connection && key.has_signed(hello, nonce)) report_finding("a stranger came in");
        text_of(hello.host);
      },
      [](size_t) {});
}

// Rank 1 of 2 against a server that says this, once.
void hear_server(std::string_view input, bool is_signed) {
  Listeners listeners = listen_at("127.0.0.1", 0);
  if (listeners.sockets.empty()) report_finding("cannot listen on 127.0.0.1");
  const uint16_t port = port_of(listeners.sockets.front());
  const HandshakeKey key(kSecret, kRun);
  std::thread server([&] {
    const auto end = SocketClock::now() + std::chrono::milliseconds(500);
    Socket connection;
    while (!connection && SocketClock::now() < end) {
      connection = accept_from(listeners.sockets.front()).socket;
      std::this_thread::yield();
    }
    listeners.sockets.clear();
    const Challenge challenge;
    Hello hello;
    if (!connection || !send_all(connection, &challenge, sizeof(challenge), end) ||
        !receive_all(connection, &hello, sizeof(hello), end)) {
      return;
    }
    std::string bytes;
    if (is_signed && !input.empty()) {
      const auto kind = static_cast<AnswerKind>(input[0]);
      append_bytes(bytes, key.answer(kind, input.substr(1), challenge.nonce, hello.nonce));
      bytes += input.substr(1);
    } else {
      bytes = input;
    }
    send_and_close(std::move(connection), bytes);
  });
  std::string problem;
  try {
    connect_ranks({.rank = 1,
                   .size = 2,
                   .address = "127.0.0.1",
                   .ports = {port},
                   .run = std::string(kRun),
                   .secret = std::string(kSecret)},
                  std::chrono::milliseconds(30));
    problem = "a server without a rank 0 was enough";
  } catch (const UserError& error) {
    check_lines(error.what());
  }
  server.join();
  if (!problem.empty()) report_finding(problem);
}

// Rank 0 of 2; what the other one sends.
SocketPost post_that_hears(std::string_view input) {
  std::array<int, 2> ends = {};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    report_finding("no socket pair");
  }
  send_and_close(Socket(ends[1]), input.substr(0, size_t{64} << 10));
  Connections connections{.sockets = {}, .machine_of_rank = {0, 0}};
  connections.sockets.resize(2);
  connections.sockets[1] = Socket(ends[0]);
  return {0, std::move(connections)};
}

void hear_frames(std::string_view input) {
  std::vector<std::byte> small(8);
  std::vector<std::byte> large(2 << 20);
  const Block small_block{small.data(), static_cast<int64_t>(small.size())};
  const Block large_block{large.data(), static_cast<int64_t>(large.size())};
  SocketPost post = post_that_hears(input);
  post.receive(1, 2, {&small_block, 1});
  post.receive(1, 3, {&large_block, 1});
  post.send(1, 4, {&large_block, 1});
  while (!post.next_gone()) post.next_message();
  post.receive(1, 5, {&small_block, 1});
  post.drop_transfers();
}

void hear_announcements(std::string_view input) {
  std::string frames;
  // Each of at most 255 bytes.
  while (!input.empty()) {
    const size_t length = std::min<size_t>(static_cast<unsigned char>(input[0]), input.size() - 1);
    append_bytes(frames, uint64_t{0});
    append_bytes(frames, length);
    frames += input.substr(1, length);
    input.remove_prefix(1 + length);
  }
  SocketPost post = post_that_hears(frames);
  PostGroup group(post, std::chrono::milliseconds(200), {});
  double number = 0;
  const TensorView view{.data = &number, .dtype = DType::f64, .shape = Shape({1})};
  try {
    group.exchange(0, 7);
    group.gather(0, "bytes");
    static_cast<ProcessGroup&>(group).member(0).receive({}, view, 1);
  } catch (const UserError& error) {
    check_lines(error.what());
  }
}

std::string input_of(Part part, std::string_view bytes) {
  return std::string(1, static_cast<char>(part)) + std::string(bytes);
}

std::string announcement(Announcement::Kind kind, std::string_view text) {
  std::string bytes;
  append_bytes(bytes, kind);
  append_bytes(bytes, uint64_t{0});
  append_bytes(bytes, uint64_t{0});
  for (const int32_t number : {1, 1, -1, -1}) append_bytes(bytes, number);
  append_bytes(bytes, text);
  append_bytes(bytes, size_t{1});
  append_bytes(bytes, DType::f64);
  append_bytes(bytes, Shape({1}));
  append_bytes(bytes, size_t{0});
  return std::string(1, static_cast<char>(bytes.size())) + bytes;
}

}  // namespace

void parse(std::string_view input) {
  if (input.empty()) return;
  const auto part = static_cast<Part>(input[0]);
  input.remove_prefix(1);
  switch (part) {
    case Part::acceptor:
      return hear_stranger(input.substr(0, size_t{32} << 10));
    case Part::post:
      return hear_frames(input);
    case Part::group:
      return hear_announcements(input);
    case Part::list:
      return hear_server(input.substr(0, size_t{32} << 10), /*is_signed=*/false);
    case Part::signed_list:
      return hear_server(input.substr(0, size_t{32} << 10), /*is_signed=*/true);
  }
}

std::vector<std::string> seeds() {
  Hello hello{.rank = 1, .size = 2, .port = 1, .host = short_text("host"), .signature = {}};
  HandshakeKey(kSecret, kRun).sign(hello, {});
  std::string bytes;
  append_bytes(bytes, hello);
  std::vector<std::string> found = {input_of(Part::acceptor, bytes)};
  // Kind, channel, length.
  for (const auto& [kind, channel, length] :
       {std::array<uint64_t, 3>{0, 0, 3}, {1, 2, 8}, {1, 7, 8}, {2, 4, 2 << 20}, {3, 3, 1 << 20}}) {
    std::string frame;
    append_bytes(frame, static_cast<uint32_t>(kind));
    append_bytes(frame, static_cast<int32_t>(channel));
    append_bytes(frame, length);
    found.push_back(input_of(Part::post, frame + std::string(8, 'x')));
  }
  using Kind = Announcement::Kind;
  for (const Kind kind : {Kind::collective, Kind::exchange, Kind::message, Kind::waits, Kind::ended,
                          Kind::failed, Kind::spoken, Kind::asks, Kind::answers}) {
    found.push_back(input_of(Part::group, announcement(kind, "text") + announcement(kind, "")));
  }
  std::string answer;
  append_bytes(answer, Answer{.digest = {}, .signature = {}});
  found.push_back(input_of(Part::list, answer));
  found.push_back(
      input_of(Part::signed_list, std::string(1, '\1') + std::string(16 + 2 * 144, '\0')));
  found.push_back(input_of(Part::signed_list, "\2no"));
  return found;
}

}  // namespace troupe::fuzz
