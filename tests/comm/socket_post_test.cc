// Processes that find each other and exchange bytes over TCP: here threads of one, each with its
// own post.
#include "comm/post/socket_post.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "comm/post/handshake.h"
#include "support/post_on_wire.h"

namespace troupe {
namespace {

using testing::post_on_wire;
using testing::PostAndWire;

using std::chrono::milliseconds;

constexpr milliseconds kPatient{60'000};

RendezvousPoint point_of(int rank, int size, uint16_t port) {
  return {.rank = rank,
          .size = size,
          .address = "localhost",
          .ports = {port},
          .run = "test",
          .may_serve = rank == 0};
}

// One that no socket listens on.
uint16_t free_port() {
  return port_of(listen_on(0).socket);
}

// What connect_ranks() says at every rank that comes; empty where all is well.
std::vector<std::string> connect_all(const std::vector<RendezvousPoint>& points, milliseconds limit,
                                     std::vector<Connections>* connections = nullptr) {
  std::vector<std::string> errors(points.size());
  std::vector<Connections> found(points.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < points.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        found[i] = connect_ranks(points[i], limit);
      } catch (const UserError& error) {
        errors[i] = error.what();
        if (errors[i].empty()) errors[i] = "(said by another rank)";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (connections != nullptr) *connections = std::move(found);
  return errors;
}

std::vector<std::unique_ptr<SocketPost>> posts_of(int size) {
  const uint16_t port = free_port();
  std::vector<RendezvousPoint> points;
  for (int rank = 0; rank < size; ++rank) points.push_back(point_of(rank, size, port));
  std::vector<Connections> connections;
  for (const std::string& error : connect_all(points, kPatient, &connections)) EXPECT_EQ(error, "");
  std::vector<std::unique_ptr<SocketPost>> posts;
  for (int rank = 0; rank < size; ++rank) {
    posts.push_back(
        std::make_unique<SocketPost>(rank, std::move(connections[static_cast<size_t>(rank)])));
  }
  return posts;
}

// Takes in what comes at all posts until `done`.
void move_until(std::vector<std::unique_ptr<SocketPost>>& posts, const std::function<bool()>& done,
                std::vector<std::string>* messages = nullptr) {
  const auto end = SocketClock::now() + kPatient;
  while (!done()) {
    ASSERT_LT(SocketClock::now(), end) << "it does not end";
    for (const auto& post : posts) {
      while (const std::optional<Post::Message> message = post->next_message()) {
        if (messages != nullptr) messages->push_back(message->bytes);
      }
    }
  }
}

std::vector<std::byte> drawn(size_t count, uint32_t stream) {
  std::vector<uint32_t> words(4 * (count / 16 + 1));
  fill_random_words(5, RandomStream::test, stream, 0, static_cast<int64_t>(count / 16 + 1),
                    words.data());
  std::vector<std::byte> bytes(count);
  if (count > 0) std::memcpy(bytes.data(), words.data(), count);
  return bytes;
}

Block block_of(std::vector<std::byte>& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size())};
}

// A rank has a connection to each other one: the soft limit of descriptors, often 1,024, is raised
// to the hard one.
TEST(Rendezvous, MayOpenAsManyConnectionsAsTheSystemAllows) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_GT(before.rlim_max, 64U);
  const rlimit low = {.rlim_cur = 64, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  posts_of(2);
  rlimit after = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Rendezvous, ConnectsAllPairsAndFindsTheRanksOfTheMachine) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(5);
  std::vector<std::string> messages;
  for (int from = 0; from < 5; ++from) {
    EXPECT_EQ(posts[static_cast<size_t>(from)]->rank(), from);
    EXPECT_EQ(posts[static_cast<size_t>(from)]->size(), 5);
    EXPECT_EQ(posts[static_cast<size_t>(from)]->machine_of_rank(), std::vector<int32_t>(5, 0));
    for (int to = 0; to < 5; ++to) {
      if (to != from) posts[static_cast<size_t>(from)]->send_message(to, "hello");
    }
  }
  move_until(
      posts, [&] { return messages.size() == 20; }, &messages);
}

TEST(Rendezvous, NamesWhoIsMissingOnce) {
  const uint16_t port = free_port();
  const std::vector<std::string> errors =
      connect_all({point_of(0, 4, port), point_of(2, 4, port)}, milliseconds(300));
  EXPECT_NE(errors[0].find("Of 4 ranks, ranks 1, 3 did not come to localhost:"), std::string::npos)
      << errors[0];
  EXPECT_NE(errors[0].find("for 0.3 s"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "(said by another rank)");
}

TEST(Rendezvous, NamesEightOfThoseThatAreMissing) {
  const std::pair<int, std::string> cases[] = {
      {2, "Of 2 ranks, rank 1 did not come to localhost:"},
      {9, "Of 9 ranks, ranks 1, 2, 3, 4, 5, 6, 7, 8 did not come to localhost:"},
      {10, "Of 10 ranks, ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1 others did not come to localhost:"}};
  for (const auto& [size, beginning] : cases) {
    const uint16_t port = free_port();
    const std::string error = connect_all({point_of(0, size, port)}, milliseconds(100))[0];
    EXPECT_EQ(error.substr(0, beginning.size()), beginning);
    const std::string end =
        ") waited for them for 0.1 s (--rendezvous-timeout-s): they have not started, cannot reach "
        "this address, or were told another one. No rank begins.";
    ASSERT_GT(error.size(), end.size());
    EXPECT_EQ(error.substr(error.size() - end.size()), end);
  }
}

TEST(Rendezvous, SaysWhereNobodyWas) {
  const uint16_t port = free_port();
  const std::string error = connect_all({point_of(1, 2, port)}, milliseconds(200))[0];
  EXPECT_EQ(error.rfind("Rank 1 of 2 (", 0), 0U) << error;
  EXPECT_NE(error.find(") has not found the rank that listens for all at localhost:" +
                       std::to_string(port)),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("Connection refused"), std::string::npos) << error;
  RendezvousPoint nowhere = point_of(1, 2, port);
  nowhere.address = "no-such-host.invalid";
  EXPECT_NE(connect_all({nowhere}, milliseconds(200))[0].find("no-such-host.invalid"),
            std::string::npos);
}

TEST(Rendezvous, RefusesASecondProcessOfOneRank) {
  const uint16_t port = free_port();
  const std::vector<std::string> errors = connect_all(
      {point_of(0, 3, port), point_of(1, 3, port), point_of(1, 3, port)}, milliseconds(1500));
  EXPECT_NE(errors[0].find("rank 2 did not come"), std::string::npos) << errors[0];
  const bool first = errors[1].find("There is a rank 1 already") != std::string::npos;
  const bool second = errors[2].find("There is a rank 1 already") != std::string::npos;
  EXPECT_NE(first, second) << errors[1] << errors[2];
}

// Somebody else's process knocks, one of another run, and one that says nothing.
TEST(Rendezvous, TurnsStrangersAway) {
  const uint16_t port = free_port();
  std::vector<std::string> stranger;
  std::vector<Socket> silent;
  std::thread strangers([&] {
    RendezvousPoint other = point_of(1, 2, port);
    other.run = "another test";
    stranger = connect_all({other}, milliseconds(500));
  });
  std::vector<std::string> errors;
  std::thread host([&] { errors = connect_all({point_of(0, 2, port)}, kPatient); });
  for (int i = 0; i < 3; ++i) {
    SocketResult result;
    while (!result.socket) result = connect_to("localhost", port, SocketClock::now() + kPatient);
    const std::string words = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody\r\n\r\n";
    if (i > 0) send_all(result.socket, words.data(), words.size(), SocketClock::now() + kPatient);
    silent.push_back(std::move(result.socket));
  }
  strangers.join();
  EXPECT_EQ(connect_all({point_of(1, 2, port)}, kPatient)[0], "");
  host.join();
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(stranger[0].find("a rank of another run answers there"), std::string::npos)
      << stranger[0];
}

// Right in all but its number, which a later build may have.
TEST(Rendezvous, TurnsAnotherProtocolAway) {
  const uint16_t port = free_port();
  std::vector<std::string> errors;
  std::thread server([&] { errors = connect_all({point_of(0, 2, port)}, milliseconds(1500)); });
  SocketResult other;
  const auto end = SocketClock::now() + kPatient;
  while (!other.socket) other = connect_to("localhost", port, end);
  Challenge challenge;
  ASSERT_TRUE(receive_all(other.socket, &challenge, sizeof(challenge), end));
  Hello hello{.rank = 1, .size = 2, .port = 1, .host = short_text("h"), .signature = {}};
  const HandshakeKey key("", "test");
  hello.run = key.run();
  ++hello.protocol;
  key.sign(hello, challenge.nonce);
  ASSERT_TRUE(send_all(other.socket, &hello, sizeof(hello), end));
  Answer answer;
  EXPECT_FALSE(receive_all(other.socket, &answer, sizeof(answer), end)) << "it is let in";
  server.join();
  EXPECT_NE(errors[0].find("rank 1 did not come"), std::string::npos) << errors[0];
}

TEST(Rendezvous, RefusesAnotherSecretAtOnce) {
  const uint16_t port = free_port();
  std::vector<RendezvousPoint> points = {point_of(0, 3, port), point_of(1, 3, port),
                                         point_of(2, 3, port)};
  points[0].secret = points[1].secret = "sixteen letters.";
  points[2].secret = "sixteen letters!";
  const std::vector<std::string> errors = connect_all(points, milliseconds(1500));
  EXPECT_NE(errors[2].find("has another secret than the rank that listens at localhost"),
            std::string::npos)
      << errors[2];
  EXPECT_NE(errors[0].find("rank 2 did not come"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find(" had another secret or were of another run"), std::string::npos)
      << errors[0];
}

// They end long before the time that ranks wait for each other.
TEST(Rendezvous, SaysAtOnceWhoHasAnotherNumberOfRanks) {
  const uint16_t port = free_port();
  const std::vector<std::string> errors =
      connect_all({point_of(0, 2, port), point_of(1, 3, port)}, std::chrono::hours(1));
  EXPECT_EQ(errors[0].rfind("Rank 1 (", 0), 0U) << errors[0];
  EXPECT_NE(errors[0].find(") was started as one of 3 ranks, rank 0 ("), std::string::npos);
  EXPECT_NE(errors[0].find(") as one of 2. Give all ranks the same number"), std::string::npos);
  EXPECT_EQ(errors[1], "(said by another rank)");
}

TEST(Rendezvous, SaysAtOnceThatThePortIsTaken) {
  const Socket taken = listen_on(0).socket;
  const std::string error = connect_all({point_of(0, 2, port_of(taken))}, std::chrono::hours(1))[0];
  EXPECT_NE(error.find("cannot listen on port " + std::to_string(port_of(taken)) +
                       " of localhost, where the ranks find each other: Address already in use"),
            std::string::npos)
      << error;
  // Nor has it visited who has the port.
  const SocketResult visitor = accept_from(taken);
  EXPECT_FALSE(visitor.socket);
  EXPECT_EQ(visitor.problem, "");
}

// An address of version 4 is written as such, also where a socket of version 6 listens.
TEST(Socket, NamesBothSidesByNumericAddresses) {
  const Socket listener = listen_on(0).socket;
  const SocketResult out =
      connect_to("127.0.0.1", port_of(listener), SocketClock::now() + kPatient);
  ASSERT_TRUE(out.socket) << out.problem;
  SocketResult in;
  while (!in.socket && in.problem.empty()) in = accept_from(listener);
  ASSERT_TRUE(in.socket) << in.problem;
  EXPECT_EQ(own_address(in.socket), "127.0.0.1");
  EXPECT_EQ(address_of_peer(in.socket), "127.0.0.1");
  EXPECT_EQ(address_of_peer(out.socket), "127.0.0.1");
}

TEST(Rendezvous, ListensOnlyWhereRanksAreExpected) {
  const uint16_t port = free_port();
  RendezvousPoint point = point_of(0, 2, port);
  point.address = "127.0.0.1";
  std::thread server([&] { connect_all({point}, milliseconds(1000)); });
  SocketResult expected;
  const auto end = SocketClock::now() + kPatient;
  while (!expected.socket) expected = connect_to("127.0.0.1", port, end);
  EXPECT_EQ(connect_to("127.0.0.2", port, end).problem, "Connection refused");
  server.join();
}

// As the own name of many machines is in /etc/hosts: such a rank cannot tell from its connection
// where the others reach it, and listens at any port of all addresses.
TEST(Rendezvous, ConnectsThroughANameOfTheLoopback) {
  const uint16_t port = free_port();
  std::vector<RendezvousPoint> points;
  for (int rank = 0; rank < 4; ++rank) {
    points.push_back(point_of(rank, 4, port));
    points.back().address = "LOCALHOST";  // resolved as localhost, and not known by its spelling
  }
  for (const std::string& error : connect_all(points, kPatient)) EXPECT_EQ(error, "");
}

// As torchrun's service may hold the first one.
TEST(Rendezvous, TakesTheNextPortWhereOneIsTaken) {
  const Socket taken = listen_on(0).socket;
  std::atomic<bool> over = false;
  std::thread service([&] {
    while (!over) {
      accept_from(taken);  // and closes it
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  const std::vector<uint16_t> ports = {port_of(taken), free_port()};
  std::vector<RendezvousPoint> points;
  for (int rank = 0; rank < 3; ++rank) {
    points.push_back(point_of(rank, 3, 0));
    points.back().ports = ports;
    // Who comes first to the machine with the address is the host, here of two that may be.
    points.back().may_serve = rank < 2;
    points.back().serves_only_at_address = true;
  }
  for (const std::string& error : connect_all(points, kPatient)) EXPECT_EQ(error, "");
  over = true;
  service.join();
}

TEST(SocketPost, MovesTransfersOfAllSizesInTheOrderOfTheirChannel) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(2);
  // Around the limit of small ones and of pieces, on three channels and both ways; the receiver
  // expects them late, or early.
  const std::vector<size_t> sizes = {
      0, 1, 32 << 10, (32 << 10) + 1, 3, 1 << 20, 5'000'011, (1 << 20) + 17, 100, 0};
  struct Pair {
    std::vector<std::byte> sent;
    std::vector<std::byte> received;
    Post::Transfer sending = 0;
    Post::Transfer receiving = 0;
  };
  std::vector<Pair> pairs(4 * sizes.size());
  const auto send = [&](size_t i) {
    pairs[i].sent = drawn(sizes[i % sizes.size()], static_cast<uint32_t>(i));
    const Block all = block_of(pairs[i].sent);
    // In two blocks, with an empty one between them.
    const std::vector<Block> blocks = {
        {all.data, all.bytes / 3},
        {nullptr, 0},
        {static_cast<std::byte*>(all.data) + all.bytes / 3, all.bytes - all.bytes / 3}};
    pairs[i].sending =
        posts[i % 2]->send(1 - static_cast<int>(i % 2), static_cast<int>(i % 3), blocks);
  };
  const auto receive = [&](size_t i) {
    pairs[i].received.resize(sizes[i % sizes.size()]);
    const Block all = block_of(pairs[i].received);
    pairs[i].receiving =
        posts[1 - i % 2]->receive(static_cast<int>(i % 2), static_cast<int>(i % 3), {&all, 1});
  };
  const size_t half = pairs.size() / 2;
  for (size_t i = 0; i < half; ++i) send(i);
  int polls = 0;
  move_until(posts, [&] { return ++polls > 100; });
  for (size_t i = 0; i < pairs.size(); ++i) receive(i);
  for (size_t i = half; i < pairs.size(); ++i) send(i);
  size_t sent = 0;
  size_t received = 0;
  move_until(posts, [&] {
    while (received < pairs.size() && posts[1 - received % 2]->done(pairs[received].receiving)) {
      ++received;
    }
    while (sent < pairs.size() && posts[sent % 2]->done(pairs[sent].sending)) ++sent;
    return sent == pairs.size() && received == pairs.size();
  });
  for (size_t i = 0; i < pairs.size(); ++i) {
    EXPECT_TRUE(pairs[i].sent == pairs[i].received) << "transfer " << i;
  }
}

// What rank 0 writes to send that on channel 3.
std::vector<std::byte> frame_of_transfer(std::vector<std::byte>& sent) {
  const Block to_send = block_of(sent);
  const PostAndWire sender = post_on_wire(0);
  sender.post->send(1, 3, {&to_send, 1});
  std::vector<std::byte> frame(1000);
  const ssize_t bytes = read(sender.wire.descriptor(), frame.data(), frame.size());
  frame.resize(static_cast<size_t>(std::max<ssize_t>(0, bytes)));
  return frame;
}

// A transfer of which a part is there, wherever it is cut, when its receiver comes to expect it.
TEST(SocketPost, CompletesWhatComesToBeExpectedWhileItComes) {
  std::vector<std::byte> sent = drawn(24, 1);
  const std::vector<std::byte> frame = frame_of_transfer(sent);
  ASSERT_GT(frame.size(), sent.size());
  for (size_t cut = 0; cut <= frame.size(); ++cut) {
    const PostAndWire receiver = post_on_wire(1);
    const auto pass = [&](size_t begin, size_t count) {
      const ssize_t passed = write(receiver.wire.descriptor(), frame.data() + begin, count);
      EXPECT_EQ(passed, static_cast<ssize_t>(count));
      receiver.post->next_message();  // takes in what is there
    };
    pass(0, cut);
    std::vector<std::byte> received(sent.size());
    const Block to_receive = block_of(received);
    const Post::Transfer transfer = receiver.post->receive(0, 3, {&to_receive, 1});
    pass(cut, frame.size() - cut);
    EXPECT_TRUE(receiver.post->done(transfer)) << "cut at " << cut;
    EXPECT_TRUE(sent == received) << "cut at " << cut;
  }
}

// A transfer that is expected before it comes, byte by byte.
TEST(SocketPost, CompletesWhatComesInSingleBytes) {
  std::vector<std::byte> sent = drawn(24, 1);
  const std::vector<std::byte> frame = frame_of_transfer(sent);
  ASSERT_GT(frame.size(), sent.size());
  const PostAndWire receiver = post_on_wire(1);
  std::vector<std::byte> received(sent.size());
  const Block to_receive = block_of(received);
  const Post::Transfer transfer = receiver.post->receive(0, 3, {&to_receive, 1});
  for (const std::byte& each : frame) {
    ASSERT_FALSE(receiver.post->done(transfer)) << "before byte " << &each - frame.data();
    ASSERT_EQ(write(receiver.wire.descriptor(), &each, 1), 1);
    receiver.post->next_message();  // takes in what is there
  }
  EXPECT_TRUE(receiver.post->done(transfer));
  EXPECT_TRUE(sent == received);
}

// A head of which the beginning fills the buffer that is read into, and the rest comes later.
TEST(SocketPost, KeepsTheBeginningOfAHead) {
  constexpr size_t kSmallBuffer = 64;
  constexpr size_t kHead = 16;
  for (size_t begun = 1; begun < kHead; ++begun) {
    const std::string first(kSmallBuffer - kHead - begun, 'a');
    const PostAndWire sender = post_on_wire(0);
    sender.post->send_message(1, first);
    sender.post->send_message(1, "second");
    std::string bytes(1000, '\0');
    const ssize_t count = read(sender.wire.descriptor(), bytes.data(), bytes.size());
    const size_t rest = kHead - begun + 6;
    ASSERT_EQ(count, static_cast<ssize_t>(kSmallBuffer + rest));
    const PostAndWire receiver = post_on_wire(1, kSmallBuffer);
    ASSERT_EQ(write(receiver.wire.descriptor(), bytes.data(), kSmallBuffer), 64);
    EXPECT_EQ(receiver.post->next_message()->bytes, first);
    EXPECT_FALSE(receiver.post->next_message());
    ASSERT_EQ(write(receiver.wire.descriptor(), bytes.data() + kSmallBuffer, rest),
              static_cast<ssize_t>(rest));
    const std::optional<Post::Message> second = receiver.post->next_message();
    ASSERT_TRUE(second) << begun;
    EXPECT_EQ(second->bytes, "second") << begun;
  }
}

// What no rank sends ends the connection with a message, whatever it is; what is just allowed does
// not.
TEST(SocketPost, RefusesFramesThatNoRankSends) {
  struct Frame {
    uint32_t kind;
    int32_t channel;
    uint64_t bytes;
  };
  constexpr uint64_t kSmall = SocketPost::kSmallTransfer;
  constexpr uint64_t kPiece = 1 << 20;
  const std::string kNone;
  const std::string kKind = "a frame of no kind";
  const std::string kChannel = "a frame of no channel";
  const std::string kLong = "a frame that is too long";
  const std::string kSize = "a tensor of another size than is expected";
  const std::vector<std::pair<Frame, std::string>> frames = {
      {{3, 3, 8}, kNone},
      {{4, 1, 0}, kKind},
      {{0xffff'ffff, 1, 8}, kKind},
      {{0, 0, Post::kLongestMessage}, kNone},
      {{0, 0, Post::kLongestMessage + 1}, kLong},
      {{0, 0, uint64_t{1} << 40}, kLong},
      {{0, 0, uint64_t{1} << 63}, kLong},
      {{0, -1, 4}, kChannel},
      {{1, Post::kChannels - 1, 4}, kNone},
      {{1, Post::kChannels, 4}, kChannel},
      {{1, 1, kSmall}, kNone},
      {{1, 1, kSmall + 1}, kLong},
      {{1, 2, 7}, kSize},
      {{1, 2, 8}, kNone},
      {{1, 2, 9}, kSize},
      {{1, 3, 12}, kSize},
      {{1, 4, kSmall}, kNone},
      {{2, 1, (uint64_t{1} << 63) - 1}, kNone},
      {{2, 1, uint64_t{1} << 63}, kLong},
      {{3, 1, 4}, kSize},           // a piece that is not expected
      {{3, 2, 8}, kSize},           // a piece of a small one
      {{3, 4, 8}, kSize},           // of the largest of these
      {{3, 5, kSmall + 1}, kNone},  // of the smallest large one, all of it
      {{3, 5, kSmall + 2}, kSize},
      {{3, 3, kPiece}, kNone},
      {{3, 3, kPiece + 1}, kLong},
      {{3, 3, uint64_t{1} << 63}, kLong},
  };
  // By channel, what is expected.
  std::array<std::vector<std::byte>, 6> expected;
  expected[2].resize(8);
  expected[3].resize(2 * kPiece);
  expected[4].resize(kSmall);
  expected[5].resize(kSmall + 1);
  for (const auto& [frame, problem] : frames) {
    const std::string name = std::to_string(frame.kind) + ", channel " +
                             std::to_string(frame.channel) + ", " + std::to_string(frame.bytes) +
                             " bytes";
    const PostAndWire receiver = post_on_wire(1);
    for (size_t channel = 2; channel < expected.size(); ++channel) {
      const Block block = block_of(expected[channel]);
      receiver.post->receive(0, static_cast<int>(channel), {&block, 1});
    }
    ASSERT_EQ(write(receiver.wire.descriptor(), &frame, sizeof(frame)), 16);
    std::string message;
    try {
      for (int i = 0; i < 3; ++i) receiver.post->next_message();
    } catch (const UserError& error) {
      message = error.what();
    }
    EXPECT_EQ(message,
              problem.empty()
                  ? ""
                  : "Rank 1 does not understand what rank 0 sends: " + problem + ". All ranks end.")
        << "a frame of kind " << name;
    EXPECT_EQ(receiver.post->next_gone().has_value(), !problem.empty()) << name;
    EXPECT_FALSE(receiver.post->next_message()) << name;
  }
}

// Of another size than comes to be expected: when all of it is there, or the first part.
TEST(SocketPost, RefusesATensorOfAnotherSizeThatCameBefore) {
  std::vector<std::byte> sent = drawn(24, 1);
  const std::vector<std::byte> frame = frame_of_transfer(sent);
  for (const size_t there : {frame.size(), frame.size() - 4}) {
    for (const size_t size : {23U, 25U}) {
      const PostAndWire receiver = post_on_wire(1);
      ASSERT_EQ(write(receiver.wire.descriptor(), frame.data(), there),
                static_cast<ssize_t>(there));
      receiver.post->next_message();
      std::vector<std::byte> received(size);
      const Block block = block_of(received);
      std::string message;
      try {
        receiver.post->receive(0, 3, {&block, 1});
        ASSERT_EQ(write(receiver.wire.descriptor(), frame.data() + there, frame.size() - there),
                  static_cast<ssize_t>(frame.size() - there));
        receiver.post->next_message();
      } catch (const UserError& error) {
        message = error.what();
      }
      EXPECT_EQ(message,
                "Rank 1 does not understand what rank 0 sends: a tensor of another size than is "
                "expected. All ranks end.")
          << there << " bytes of a frame, then " << size << " are expected";
      EXPECT_EQ(received, std::vector<std::byte>(size)) << "it is written all the same";
    }
  }
}

// The sender of a large transfer waits for that, and is not told of a small one.
TEST(SocketPost, SaysThatItExpectsALargeTransferOnly) {
  const PostAndWire receiver = post_on_wire(1);
  std::vector<std::byte> received(SocketPost::kSmallTransfer + 1);
  for (int channel = 1; channel <= 3; ++channel) {
    const Block block{received.data(), SocketPost::kSmallTransfer - 2 + channel};
    receiver.post->receive(0, channel, {&block, 1});
  }
  std::array<uint64_t, 4> heads = {};
  ASSERT_EQ(read(receiver.wire.descriptor(), heads.data(), sizeof(heads)), 16);
  EXPECT_EQ(heads[0], (uint64_t{3} << 32) + 2);
  EXPECT_EQ(heads[1], static_cast<uint64_t>(SocketPost::kSmallTransfer) + 1);
}

// More than go into one call of the system, of other sizes at both ends: expected late, while it
// comes, and early.
TEST(SocketPost, MovesTransfersInManyBlocks) {
  std::vector<std::byte> sent = drawn(1200, 1);
  std::vector<Block> from;
  for (size_t at = 0; at < sent.size(); at += 8) from.push_back({sent.data() + at, 8});
  for (const size_t before : {0U, 500U, 1216U}) {
    const PostAndWire sender = post_on_wire(0);
    EXPECT_TRUE(sender.post->done(sender.post->send(1, 3, from)));
    std::vector<std::byte> frame(2000);
    ASSERT_EQ(read(sender.wire.descriptor(), frame.data(), frame.size()), 1216);
    const PostAndWire receiver = post_on_wire(1);
    const auto pass = [&](size_t begin, size_t end) {
      const ssize_t count = write(receiver.wire.descriptor(), frame.data() + begin, end - begin);
      EXPECT_EQ(count, static_cast<ssize_t>(end - begin));
      receiver.post->next_message();
    };
    if (before > 0) pass(0, before);
    std::vector<std::byte> received(sent.size());
    std::vector<Block> to;
    for (size_t at = 0; at < received.size(); at += 6) to.push_back({received.data() + at, 6});
    const Post::Transfer transfer = receiver.post->receive(0, 3, to);
    if (before < 1216) pass(before, 1216);
    EXPECT_TRUE(receiver.post->done(transfer)) << before << " bytes came before";
    EXPECT_TRUE(received == sent) << before << " bytes came before";
  }
}

// In the middle of a piece of many blocks, of which the memory is used for something else at once.
TEST(SocketPost, KeepsACopyOfThePieceThatItDropsATransferIn) {
  constexpr size_t kPiece = 1 << 20;
  std::vector<std::byte> sent = drawn(2 * kPiece, 1);
  const std::vector<std::byte> expected = sent;
  std::vector<Block> blocks;
  for (size_t at = 0; at < sent.size(); at += 4096) blocks.push_back({sent.data() + at, 4096});
  const PostAndWire sender = post_on_wire(0);
  sender.post->send(1, 3, blocks);
  const std::array<uint64_t, 2> expects = {(uint64_t{3} << 32) + 2, 2 * kPiece};
  ASSERT_EQ(write(sender.wire.descriptor(), expects.data(), 16), 16);
  EXPECT_FALSE(sender.post->next_message());  // fills the connection
  sender.post->drop_transfers();
  std::fill(sent.begin(), sent.end(), std::byte{0});
  sender.post->send_message(1, "failed");
  std::vector<std::byte> bytes(4 * kPiece);
  size_t count = 0;
  const auto end = SocketClock::now() + kPatient;
  while (count < 16 + kPiece + 16 + 6 && SocketClock::now() < end) {
    const ssize_t got = read(sender.wire.descriptor(), bytes.data() + count, bytes.size() - count);
    if (got > 0) count += static_cast<size_t>(got);
    sender.post->next_message();
  }
  ASSERT_EQ(count, 16 + kPiece + 16 + 6) << "a piece and a message";
  EXPECT_TRUE(std::equal(bytes.begin() + 16, bytes.begin() + 16 + kPiece, expected.begin()));
  EXPECT_EQ(std::memcmp(bytes.data() + 16 + kPiece + 16, "failed", 6), 0);
}

TEST(SocketPost, LetsNotesAndOtherChannelsPassWhatNobodyTakes) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(2);
  // More than the system's buffers hold, and many small ones.
  std::vector<std::byte> large = drawn(16 << 20, 1);
  std::vector<std::byte> small = drawn(30'000, 2);
  const Block large_block = block_of(large);
  const Block small_block = block_of(small);
  const Post::Transfer blocked = posts[0]->send(1, 1, {&large_block, 1});
  for (int i = 0; i < 1000; ++i) posts[0]->send(1, 2, {&small_block, 1});
  std::vector<std::string> messages;
  for (int i = 0; i < 1000; ++i) posts[0]->send_message(1, std::to_string(i));
  move_until(
      posts, [&] { return messages.size() == 1000; }, &messages);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(messages[static_cast<size_t>(i)], std::to_string(i));
  // Another channel goes ahead.
  std::vector<std::byte> other(large.size());
  const Block other_block = block_of(other);
  posts[0]->send(1, 3, {&large_block, 1});
  const Post::Transfer ahead = posts[1]->receive(0, 3, {&other_block, 1});
  move_until(posts, [&] { return posts[1]->done(ahead); });
  EXPECT_TRUE(other == large);
  EXPECT_FALSE(posts[0]->done(blocked));
}

TEST(SocketPost, SaysWhoIsGoneAfterItsLastNote) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(3);
  posts[1]->send_message(0, "last");
  posts[1].reset();
  std::vector<std::string> messages;
  std::optional<int32_t> gone;
  const auto end = SocketClock::now() + kPatient;
  while (!gone && SocketClock::now() < end) {
    while (const std::optional<Post::Message> message = posts[0]->next_message()) {
      messages.push_back(message->bytes);
    }
    gone = posts[0]->next_gone();
  }
  EXPECT_EQ(gone, 1);
  EXPECT_EQ(messages, std::vector<std::string>{"last"});
  // Once, however long the others go on.
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(posts[0]->next_message());
    EXPECT_EQ(posts[0]->next_gone(), std::nullopt);
  }
  // What is sent to it goes nowhere.
  posts[0]->send_message(1, "late");
  std::vector<std::byte> bytes = drawn(100'000, 1);
  const Block block = block_of(bytes);
  EXPECT_FALSE(posts[0]->done(posts[0]->send(1, 1, {&block, 1})));
}

// In the middle of a large transfer each way, whose memory is gone then.
TEST(SocketPost, DeliversNotesAfterTransfersAreDropped) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(2);
  auto sent = std::make_unique<std::vector<std::byte>>(drawn(16 << 20, 1));
  auto received = std::make_unique<std::vector<std::byte>>(16 << 20);
  const Block from = block_of(*sent);
  const Block to = block_of(*received);
  posts[0]->send(1, 1, {&from, 1});
  posts[1]->receive(0, 1, {&to, 1});
  posts[1]->send(0, 2, {&from, 1});
  posts[0]->receive(1, 2, {&to, 1});
  for (int i = 0; i < 4; ++i) {
    for (const auto& post : posts) EXPECT_FALSE(post->next_message());
  }
  for (const auto& post : posts) post->drop_transfers();
  sent.reset();
  received.reset();
  for (int rank = 0; rank < 2; ++rank) {
    posts[static_cast<size_t>(rank)]->send_message(1 - rank, "failed");
  }
  std::vector<std::string> messages;
  move_until(
      posts, [&] { return messages.size() == 2; }, &messages);
  EXPECT_EQ(messages, (std::vector<std::string>{"failed", "failed"}));
}

// To the receiver, which may not know yet that a rank failed, pieces are whole or not there.
TEST(SocketPost, CompletesThePieceThatItDropsATransferIn) {
  constexpr size_t kPiece = 1 << 20;
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(2);
  std::vector<std::byte> sent = drawn(16 * kPiece, 1);
  const std::vector<std::byte> expected = sent;
  std::vector<std::byte> received(16 * kPiece);
  const Block from = block_of(sent);
  const Block to = block_of(received);
  posts[0]->send(1, 1, {&from, 1});
  posts[1]->receive(0, 1, {&to, 1});
  for (int i = 0; i < 2; ++i) {
    for (const auto& post : posts) EXPECT_FALSE(post->next_message());
  }
  posts[0]->drop_transfers();
  std::fill(sent.begin(), sent.end(), std::byte{0});
  posts[0]->send_message(1, "failed");
  std::vector<std::string> messages;
  move_until(
      posts, [&] { return !messages.empty(); }, &messages);
  const std::vector<std::byte> nothing(kPiece);
  size_t came = 0;
  for (size_t piece = 0; piece < 16; ++piece) {
    const auto here = received.begin() + static_cast<std::ptrdiff_t>(piece * kPiece);
    if (std::equal(nothing.begin(), nothing.end(), here)) continue;
    ++came;
    EXPECT_TRUE(std::equal(here, here + kPiece,
                           expected.begin() + static_cast<std::ptrdiff_t>(piece * kPiece)))
        << piece;
  }
  EXPECT_GT(came, 0U);
  EXPECT_LT(came, 16U);
}

TEST(SocketPost, FinishesWhenAllDo) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(3);
  for (int to = 1; to < 3; ++to) posts[0]->send_message(to, std::string(3'000'000, 'x'));
  std::vector<std::thread> threads;
  for (const auto& post : posts) threads.emplace_back([&post] { post->finish(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& post : posts) {
    EXPECT_TRUE(post->next_gone().has_value());
    EXPECT_TRUE(post->next_gone().has_value());
  }
}

}  // namespace
}  // namespace troupe
