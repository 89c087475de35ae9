// Processes that meet and exchange bytes over TCP: here threads of one, each with its own post.
#include "parallel/post/socket_post.h"

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/error.h"
#include "base/random.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatient{60'000};

MeetingPlace place_of(int rank, int size, uint16_t port) {
  return {.rank = rank,
          .size = size,
          .address = "localhost",
          .ports = {port},
          .run = "test",
          .may_host = rank == 0};
}

// One that nobody listens on.
uint16_t free_port() {
  return port_of(listen_on(0).socket);
}

// What meet() says at every rank that comes; empty where all is well.
std::vector<std::string> meet_all(const std::vector<MeetingPlace>& places, milliseconds limit,
                                  std::vector<Connections>* connections = nullptr) {
  std::vector<std::string> errors(places.size());
  std::vector<Connections> found(places.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < places.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        found[i] = meet(places[i], limit);
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
  std::vector<MeetingPlace> places;
  for (int rank = 0; rank < size; ++rank) places.push_back(place_of(rank, size, port));
  std::vector<Connections> connections;
  for (const std::string& error : meet_all(places, kPatient, &connections)) EXPECT_EQ(error, "");
  std::vector<std::unique_ptr<SocketPost>> posts;
  for (int rank = 0; rank < size; ++rank) {
    posts.push_back(
        std::make_unique<SocketPost>(rank, std::move(connections[static_cast<size_t>(rank)])));
  }
  return posts;
}

// Takes in what comes at all posts until `done`.
void move_until(std::vector<std::unique_ptr<SocketPost>>& posts, const std::function<bool()>& done,
                std::vector<std::string>* notes = nullptr) {
  const auto end = SocketClock::now() + kPatient;
  while (!done()) {
    ASSERT_LT(SocketClock::now(), end) << "it does not end";
    for (const auto& post : posts) {
      while (const std::optional<Post::Note> note = post->next_note()) {
        if (notes != nullptr) notes->push_back(note->bytes);
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

TEST(Meeting, ConnectsAllPairsAndFindsTheRanksOfTheMachine) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(5);
  std::vector<std::string> notes;
  for (int from = 0; from < 5; ++from) {
    EXPECT_EQ(posts[static_cast<size_t>(from)]->rank(), from);
    EXPECT_EQ(posts[static_cast<size_t>(from)]->size(), 5);
    EXPECT_EQ(posts[static_cast<size_t>(from)]->machine_of_rank(), std::vector<int32_t>(5, 0));
    for (int to = 0; to < 5; ++to) {
      if (to != from) posts[static_cast<size_t>(from)]->send_note(to, "hello");
    }
  }
  move_until(
      posts, [&] { return notes.size() == 20; }, &notes);
}

TEST(Meeting, NamesWhoIsMissingOnce) {
  const uint16_t port = free_port();
  const std::vector<std::string> errors =
      meet_all({place_of(0, 4, port), place_of(2, 4, port)}, milliseconds(300));
  EXPECT_NE(errors[0].find("Of 4 ranks, ranks 1, 3 did not come to localhost:"), std::string::npos)
      << errors[0];
  EXPECT_NE(errors[0].find("for 0.3 s"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "(said by another rank)");
}

TEST(Meeting, SaysWhereNobodyWas) {
  const uint16_t port = free_port();
  const std::string error = meet_all({place_of(1, 2, port)}, milliseconds(200))[0];
  EXPECT_NE(error.find("Rank 1 of 2 has found nobody at localhost:" + std::to_string(port)),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("Connection refused"), std::string::npos) << error;
  MeetingPlace nowhere = place_of(1, 2, port);
  nowhere.address = "no-such-host.invalid";
  EXPECT_NE(meet_all({nowhere}, milliseconds(200))[0].find("no-such-host.invalid"),
            std::string::npos);
}

TEST(Meeting, RefusesASecondProcessOfOneRank) {
  const uint16_t port = free_port();
  const std::vector<std::string> errors = meet_all(
      {place_of(0, 3, port), place_of(1, 3, port), place_of(1, 3, port)}, milliseconds(1500));
  EXPECT_NE(errors[0].find("rank 2 did not come"), std::string::npos) << errors[0];
  const bool first = errors[1].find("There is a rank 1 already") != std::string::npos;
  const bool second = errors[2].find("There is a rank 1 already") != std::string::npos;
  EXPECT_NE(first, second) << errors[1] << errors[2];
}

// Somebody else's process knocks, one of another run, and one that says nothing.
TEST(Meeting, TurnsStrangersAway) {
  const uint16_t port = free_port();
  std::vector<std::string> stranger;
  std::vector<Socket> silent;
  std::thread strangers([&] {
    MeetingPlace other = place_of(1, 2, port);
    other.run = "another test";
    stranger = meet_all({other}, milliseconds(500));
  });
  std::vector<std::string> errors;
  std::thread host([&] { errors = meet_all({place_of(0, 2, port)}, kPatient); });
  for (int i = 0; i < 3; ++i) {
    SocketResult result;
    while (!result.socket) result = connect_to("localhost", port, SocketClock::now() + kPatient);
    const std::string words = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody\r\n\r\n";
    if (i > 0) send_all(result.socket, words.data(), words.size(), SocketClock::now() + kPatient);
    silent.push_back(std::move(result.socket));
  }
  strangers.join();
  EXPECT_EQ(meet_all({place_of(1, 2, port)}, kPatient)[0], "");
  host.join();
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(stranger[0].find("somebody else answers there"), std::string::npos) << stranger[0];
}

// As torchrun's service may hold the first one.
TEST(Meeting, TakesTheNextPortWhereOneIsTaken) {
  const Socket taken = listen_on(0).socket;
  std::atomic<bool> over = false;
  std::thread service([&] {
    while (!over) {
      accept_from(taken);  // and closes it
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  const std::vector<uint16_t> ports = {port_of(taken), free_port()};
  std::vector<MeetingPlace> places;
  for (int rank = 0; rank < 3; ++rank) {
    places.push_back(place_of(rank, 3, 0));
    places.back().ports = ports;
    // Who comes first to the machine with the address is the host, here of two that may be.
    places.back().may_host = rank < 2;
    places.back().hosts_only_at_address = true;
  }
  for (const std::string& error : meet_all(places, kPatient)) EXPECT_EQ(error, "");
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

// A post of rank 0 or 1, and the other end of its connection.
struct PostAndWire {
  std::unique_ptr<SocketPost> post;
  Socket wire;
};
PostAndWire post_on_wire(int rank) {
  std::array<int, 2> ends = {};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
  Connections connections{.sockets = {}, .machine_of_rank = {0, 0}};
  connections.sockets.resize(2);
  connections.sockets[static_cast<size_t>(1 - rank)] = Socket(ends[0]);
  return {std::make_unique<SocketPost>(rank, std::move(connections)), Socket(ends[1])};
}

// A transfer of which a part is there, wherever it is cut, when its receiver comes to expect it.
TEST(SocketPost, CompletesWhatComesToBeExpectedWhileItComes) {
  std::vector<std::byte> sent = drawn(24, 1);
  const Block to_send = block_of(sent);
  const PostAndWire sender = post_on_wire(0);
  sender.post->send(1, 3, {&to_send, 1});
  std::vector<std::byte> frame(1000);
  const ssize_t bytes = read(sender.wire.descriptor(), frame.data(), frame.size());
  ASSERT_GT(bytes, 24);
  frame.resize(static_cast<size_t>(bytes));
  for (size_t cut = 0; cut <= frame.size(); ++cut) {
    const PostAndWire receiver = post_on_wire(1);
    const auto pass = [&](size_t begin, size_t count) {
      const ssize_t passed = write(receiver.wire.descriptor(), frame.data() + begin, count);
      EXPECT_EQ(passed, static_cast<ssize_t>(count));
      receiver.post->next_note();  // takes in what is there
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

TEST(SocketPost, LetsNotesAndOtherChannelsPassWhatNobodyTakes) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(2);
  // More than the system's buffers hold, and many small ones.
  std::vector<std::byte> large = drawn(16 << 20, 1);
  std::vector<std::byte> small = drawn(30'000, 2);
  const Block large_block = block_of(large);
  const Block small_block = block_of(small);
  const Post::Transfer blocked = posts[0]->send(1, 1, {&large_block, 1});
  for (int i = 0; i < 1000; ++i) posts[0]->send(1, 2, {&small_block, 1});
  std::vector<std::string> notes;
  for (int i = 0; i < 1000; ++i) posts[0]->send_note(1, std::to_string(i));
  move_until(
      posts, [&] { return notes.size() == 1000; }, &notes);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(notes[static_cast<size_t>(i)], std::to_string(i));
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
  posts[1]->send_note(0, "last");
  posts[1].reset();
  std::vector<std::string> notes;
  std::optional<int32_t> gone;
  const auto end = SocketClock::now() + kPatient;
  while (!gone && SocketClock::now() < end) {
    while (const std::optional<Post::Note> note = posts[0]->next_note()) {
      notes.push_back(note->bytes);
    }
    gone = posts[0]->next_gone();
  }
  EXPECT_EQ(gone, 1);
  EXPECT_EQ(notes, std::vector<std::string>{"last"});
  EXPECT_EQ(posts[0]->next_gone(), std::nullopt);
  // What is sent to it goes nowhere.
  posts[0]->send_note(1, "late");
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
    for (const auto& post : posts) EXPECT_FALSE(post->next_note());
  }
  for (const auto& post : posts) post->drop_transfers();
  sent.reset();
  received.reset();
  for (int rank = 0; rank < 2; ++rank) {
    posts[static_cast<size_t>(rank)]->send_note(1 - rank, "failed");
  }
  std::vector<std::string> notes;
  move_until(
      posts, [&] { return notes.size() == 2; }, &notes);
  EXPECT_EQ(notes, (std::vector<std::string>{"failed", "failed"}));
}

TEST(SocketPost, FinishesWhenAllDo) {
  std::vector<std::unique_ptr<SocketPost>> posts = posts_of(3);
  for (int to = 1; to < 3; ++to) posts[0]->send_note(to, std::string(3'000'000, 'x'));
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
