// A rank that gets, from another one, what no rank of this build announces. The other rank is the
// end of a connection here.
#include "comm/post/post_group.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <gtest/gtest.h>
#include <latch>
#include <new>
#include <poll.h>
#include <regex>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/bytes.h"
#include "comm/post/socket_post.h"
#include "support/post_on_wire.h"

namespace troupe {
namespace {

using testing::make_wire;
using testing::post_on_wire;
using testing::post_over;
using Kind = Announcement::Kind;

// As PostGroup writes it.
struct Fields {
  Kind kind = Kind::exchange;
  uint64_t number = 0;
  int32_t channel = 1;
  int32_t index = 0;
  std::string text = {};
  size_t tensors = 0;
  std::vector<std::pair<DType, Shape>> tensor_types = {};
  size_t waits_for = 0;
  std::vector<int32_t> ranks = {};
  uint64_t room = 0;
};

// The room of ranks 0 and 1: FNV-1a of the two numbers.
constexpr uint64_t kBoth = 0x8cd4c29d1e47d34ULL;

std::string bytes_of(const Fields& fields) {
  std::string bytes;
  append_bytes(bytes, fields.kind);
  append_bytes(bytes, fields.room);
  append_bytes(bytes, fields.number);
  append_bytes(bytes, fields.channel);
  append_bytes(bytes, fields.index);
  append_bytes(bytes, int32_t{-1});
  append_bytes(bytes, int32_t{-1});
  append_bytes(bytes, std::string_view(fields.text));
  append_bytes(bytes, fields.tensors);
  for (const auto& [dtype, shape] : fields.tensor_types) {
    append_bytes(bytes, dtype);
    append_bytes(bytes, shape);
  }
  append_bytes(bytes, fields.waits_for);
  for (const int32_t rank : fields.ranks) append_bytes(bytes, rank);
  return bytes;
}

Shape shape_of_rank(int rank) {
  Shape shape({1, 1, 1, 1});
  std::string bytes;
  append_bytes(bytes, shape);
  std::memcpy(bytes.data() + 4 * sizeof(int64_t), &rank, sizeof(rank));
  std::memcpy(&shape, bytes.data(), sizeof(shape));
  return shape;
}

// With what rank 0 ends when rank 1 sends this message.
UserError error_after(const std::string& bytes) {
  const auto [post, wire] = post_on_wire(0);
  std::string frame;
  append_bytes(frame, uint64_t{0});  // a message
  append_bytes(frame, bytes.size());
  frame += bytes;
  EXPECT_EQ(write(wire.descriptor(), frame.data(), frame.size()),
            static_cast<ssize_t>(frame.size()));
  PostGroup group(*post, std::chrono::seconds(60), {});
  try {
    for (int i = 0; i < 2; ++i) group.exchange(0, 7);
  } catch (const UserError& error) {
    return error;
  }
  return {ExitStatus::done, "(nothing)"};
}

std::string message_after(const std::string& bytes) {
  return error_after(bytes).what();
}

TEST(PostGroup, RefusesWhatNoRankAnnounces) {
  const std::string whole = bytes_of({});
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(message_after(whole.substr(0, size)).find("is cut short"), std::string::npos)
        << size << " bytes";
  }
  const std::vector<std::string> announcements = {
      whole + "x",
      bytes_of({.kind = static_cast<Kind>(9)}),
      bytes_of({.kind = static_cast<Kind>(255)}),
      bytes_of({.channel = -1}),
      bytes_of({.channel = Post::kChannels}),
      bytes_of({.tensors = size_t{1} << 62}),
      bytes_of({.tensors = 1, .tensor_types = {{static_cast<DType>(99), Shape({1})}}}),
      bytes_of({.tensors = 1, .tensor_types = {{DType::f32, shape_of_rank(5)}}}),
      bytes_of({.tensors = 1, .tensor_types = {{DType::f32, shape_of_rank(-1)}}}),
      bytes_of({.tensors = 1, .tensor_types = {{DType::f32, Shape({int64_t{1} << 40, 1 << 30})}}}),
      bytes_of({.kind = Kind::message}),  // of no tensor
      bytes_of({.kind = Kind::failed, .index = 2}),
      bytes_of({.waits_for = size_t{1} << 61}),
      bytes_of({.kind = Kind::waits, .waits_for = 1, .ranks = {2}}),
  };
  for (size_t i = 0; i < announcements.size(); ++i) {
    const std::string message = message_after(announcements[i]);
    EXPECT_TRUE(message.find("is no announcement") != std::string::npos ||
                message.find("is cut short") != std::string::npos)
        << "announcement " << i << ": " << message;
  }
}

// Who reports a failure may leave afterwards, and its memory with it.
TEST(PostGroup, WritesNoMemoryOnceAFailureIsReported) {
  const auto [post, wire] = post_on_wire(0);
  std::string frame;
  append_bytes(frame, uint32_t{1});  // a small transfer
  append_bytes(frame, int32_t{3});   // on this channel
  append_bytes(frame, uint64_t{8});
  frame += "too late";
  ASSERT_EQ(write(wire.descriptor(), frame.data(), frame.size()),
            static_cast<ssize_t>(frame.size()));
  {
    PostGroup group(*post, std::chrono::seconds(60), {});
    EXPECT_TRUE(group.announce_failure(ExitStatus::failed, "no more"));
  }
  // Whether the frame came before the failure was reported or after it.
  std::array<std::byte, 8> received = {};
  const Block block{received.data(), 8};
  EXPECT_FALSE(post->done(post->receive(1, 3, {&block, 1})));
  EXPECT_EQ(received, (std::array<std::byte, 8>{}));
}

// A failure is one whatever number comes with it.
TEST(PostGroup, StatusOfAnotherRanksFailureIsOneOfAFailure) {
  const auto status = [](uint64_t number) {
    return error_after(bytes_of({.kind = Kind::failed, .number = number, .index = 1})).status();
  };
  for (const uint64_t number : {0U, 1U, 4U, 255U, 256U, 258U}) {
    EXPECT_EQ(status(number), ExitStatus::failed) << number;
  }
  EXPECT_EQ(status((uint64_t{1} << 32) + 2), ExitStatus::failed);
  for (const ExitStatus known :
       {ExitStatus::bad_request, ExitStatus::does_not_fit, ExitStatus::interrupted}) {
    EXPECT_EQ(status(static_cast<uint64_t>(known)), known);
  }
}

// The other rank's window is larger than this one's, and it fills its section.
TEST(PostGroup, RefusesMoreThanASectionOfAWindow) {
  std::array<Socket, 2> ends = make_wire();
  std::array<std::string, 2> messages;
  std::latch done(2);
  const auto run = [&](int rank, int64_t bytes) {
    const auto post = post_over(std::move(ends[static_cast<size_t>(rank)]), rank);
    PostGroup group(*post, std::chrono::seconds(60), {});
    std::array<std::byte, 64> window = {};
    std::array<std::byte, 64> sent = {};
    const Block block{window.data(), bytes};
    try {
      Communicator& both = group.member(rank);
      both.open({}, {&block, 1});
      both.put(1 - rank, 0, 0, {sent.data(), bytes / 2});
      both.close();
    } catch (const UserError& error) {
      messages[static_cast<size_t>(rank)] = error.what();
    }
    done.arrive_and_wait();  // until then neither is gone
  };
  std::thread other([&] { run(1, 64); });
  run(0, 16);
  other.join();
  EXPECT_EQ(messages[0], "Rank 1 writes 32 bytes to a section of 8. All ranks end.");
}

TEST(PostGroup, PrintsNoControlCharactersOfAnotherRank) {
  const std::string message =
      message_after(bytes_of({.kind = Kind::failed, .index = 1, .text = "a\x1b[2J \x1f~\x7f\nc"}));
  EXPECT_EQ(message, "a?[2J ?~?\nc");
}

// As messages of the other rank.
void say(const Socket& wire, const std::vector<Fields>& said) {
  std::string frames;
  for (const Fields& each : said) {
    const std::string bytes = bytes_of(each);
    append_bytes(frames, uint64_t{0});  // a message
    append_bytes(frames, bytes.size());
    frames += bytes;
  }
  EXPECT_EQ(write(wire.descriptor(), frames.data(), frames.size()),
            static_cast<ssize_t>(frames.size()));
}

struct Heard {
  Kind kind = Kind::message;
  int32_t index = -1;
};

void wait_for_message(const Socket& wire) {
  pollfd message{.fd = wire.descriptor(), .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&message, 1, 30'000), 1);
}

// The messages that have come from the group.
std::vector<Heard> heard(const Socket& wire) {
  std::string bytes(size_t{1} << 16, '\0');
  bytes.resize(static_cast<size_t>(
      std::max<ssize_t>(0, read(wire.descriptor(), bytes.data(), bytes.size()))));
  std::vector<Heard> messages;
  ByteReader reader(bytes);
  while (!reader.at_end()) {
    reader.take<uint64_t>();
    const std::string_view text = reader.take_text();
    ByteReader fields(text);
    Heard& message = messages.emplace_back();
    message.kind = fields.take<Kind>();
    fields.take<std::array<uint64_t, 2>>();
    fields.take<int32_t>();
    message.index = fields.take<int32_t>();
  }
  return messages;
}

// What rank 1 of two has said, and what rank 0 then says of it after waiting in a collective or for
// the numbers of all.
std::string message_of_waiting(const std::vector<Fields>& said, bool in_collective) {
  const auto [post, wire] = post_on_wire(0);
  say(wire, said);
  PostGroup group(*post, std::chrono::milliseconds(20), {});
  try {
    if (in_collective) {
      int32_t count = 0;
      const TensorView view{&count, DType::i32, {1}, nullptr};
      group.member(0).prefix_sum({}, view, view, view);
    } else {
      group.exchange(0, 7);
    }
  } catch (const UserError& error) {
    return error.what();
  }
  return "(nothing)";
}

TEST(PostGroup, SaysWhatARankThatDoesNotComeDoes) {
  const Fields seen{.kind = Kind::waits, .index = 5, .text = "gather"};
  const Fields waits{
      .kind = Kind::waits, .index = 5, .text = "gather", .waits_for = 1, .ranks = {0}};
  const Fields ended{.kind = Kind::ended, .number = ~uint64_t{0}};
  EXPECT_EQ(message_of_waiting({}, true),
            "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (is missing, last seen "
            "in no operation). All ranks end.");
  EXPECT_EQ(message_of_waiting({seen}, true),
            "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (is missing, last seen "
            "in operation 5 (gather)). All ranks end.");
  EXPECT_EQ(message_of_waiting({waits}, true),
            "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (waits itself in "
            "operation 5 (gather), for rank 0). All ranks end.");
  EXPECT_EQ(message_of_waiting({ended}, true),
            "Rank 0 cannot go on in no operation, waiting for: rank 1 (has ended, last seen in no "
            "operation). All ranks end.");
  EXPECT_EQ(message_of_waiting({}, false),
            "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (does not answer, last "
            "seen in no operation). All ranks end.");
  EXPECT_EQ(message_of_waiting({ended}, false),
            "Rank 0 cannot go on in no operation, waiting for: rank 1 (has ended, last seen in no "
            "operation). All ranks end.");
}

TEST(PostGroup, TakesWhatIsJustAnAnnouncement) {
  const std::string late =
      "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (is missing, last seen in no "
      "operation). All ranks end.";
  EXPECT_EQ(message_of_waiting({{.kind = Kind::answers}}, true), late);
  EXPECT_EQ(message_of_waiting({{.kind = Kind::answers, .channel = 0}}, true), late);
  EXPECT_EQ(message_of_waiting({{.kind = Kind::answers, .channel = Post::kChannels - 1}}, true),
            late);
  // Its own failure, as another rank passes it on.
  EXPECT_EQ(message_of_waiting({{.kind = Kind::failed, .index = 0, .text = "own"}}, true), late);
}

// Rank 1 comes with as many numbers, but to exchange them; or it is done with waiting.
TEST(PostGroup, TellsCallsApart) {
  EXPECT_EQ(
      message_of_waiting(
          {{.tensors = 1, .tensor_types = {{DType::i32, Shape({1})}}, .room = kBoth}}, true),
      "The ranks do not run the same collective: rank 0 is in no operation of i32 [1], rank 1 "
      "in no operation of i32 [1]. All ranks end.");
  EXPECT_EQ(message_of_waiting(
                {{.kind = Kind::waits, .index = 5, .text = "gather", .waits_for = 1, .ranks = {0}},
                 {.kind = Kind::collective, .index = 6, .text = "sum", .room = 1}},
                true),
            "Rank 0 timed out (0.02 s) in no operation, waiting for: rank 1 (is missing, last seen "
            "in operation 6 (sum)). All ranks end.");
}

// While the rank computes, or writes to a disk.
TEST(PostGroup, AnswersInTheBackground) {
  const auto [post, wire] = post_on_wire(0);
  PostGroup group(*post, std::chrono::seconds(60), {});
  say(wire, {{.kind = Kind::asks}});
  wait_for_message(wire);
  const std::vector<Heard> messages = heard(wire);
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages[0].kind, Kind::answers);
}

// The lowest rank that is there says what has failed, and rank 1 nothing where rank 0 has spoken.
TEST(PostGroup, OneRankSpeaksOfAFailure) {
  for (const bool has_spoken : {true, false}) {
    auto [post, wire] = post_on_wire(1);
    if (has_spoken) say(wire, {{.kind = Kind::spoken}});
    wire.reset();
    PostGroup group(*post, std::chrono::seconds(60), {});
    EXPECT_EQ(group.announce_failure(ExitStatus::failed, "why"), !has_spoken);
  }
  for (const bool is_own : {true, false}) {
    const auto [post, wire] = post_on_wire(0);
    PostGroup group(*post, std::chrono::seconds(60), {});
    if (!is_own) {
      say(wire, {{.kind = Kind::failed, .index = 1, .text = "why"}});
      EXPECT_THROW(group.exchange(0, 7), UserError);
    }
    EXPECT_TRUE(group.announce_failure(ExitStatus::failed, "why"));
    std::vector<Heard> messages = heard(wire);
    ASSERT_GE(messages.size(), 2U);
    EXPECT_EQ(messages.back().kind, Kind::spoken);
    messages.pop_back();
    EXPECT_EQ(messages.back().kind, Kind::failed);
    EXPECT_EQ(messages.back().index, is_own ? 0 : 1) << "the rank it began with";
  }
}

// It has not ended without a word.
TEST(PostGroup, KeepsWhatAFailedRankHasSaidOnceItIsGone) {
  const auto [post, wire] = post_on_wire(1);
  say(wire, {{.kind = Kind::failed, .index = 0, .text = "why"}});
  ASSERT_EQ(shutdown(wire.descriptor(), SHUT_WR), 0);
  PostGroup group(*post, std::chrono::seconds(60), {});
  EXPECT_EQ(
      [&] {
        try {
          group.exchange(1, 7);
        } catch (const UserError& error) {
          return std::string(error.what());
        }
        return std::string();
      }(),
      "why");
}

// What a body throws goes to who ends all.
TEST(PostGroup, HandsOnWhatABodyThrows) {
  const auto handed_on = [](const std::function<void(int)>& body) {
    const auto [post, wire] = post_on_wire(0);
    say(wire, {{.kind = Kind::ended, .number = 1}});
    std::pair<ExitStatus, std::string> failure = {ExitStatus::done, "(nothing)"};
    PostGroup group(*post, std::chrono::seconds(60),
                    [&](ExitStatus status, const std::string& why) {
                      failure = {status, why};
                    });
    run_ranks(group, body);
    EXPECT_EQ(heard(wire).size(), 1U) << "that the run has ended";
    return failure;
  };
  using Failure = std::pair<ExitStatus, std::string>;
  EXPECT_EQ(handed_on([](int) {}), (Failure{ExitStatus::done, "(nothing)"}));
  EXPECT_EQ(handed_on([](int) { throw UserError(ExitStatus::interrupted, "stop"); }),
            (Failure{ExitStatus::interrupted, "stop"}));
  EXPECT_EQ(handed_on([](int) { throw std::bad_alloc(); }),
            (Failure{ExitStatus::failed, "out of memory."}));
  EXPECT_EQ(handed_on([](int) { throw std::runtime_error("other"); }),
            (Failure{ExitStatus::failed, "other"}));
}

// Rank 0 says why, at what time; rank 1 nothing where rank 0 has spoken.
TEST(PostProcessesDeathTest, EndWithTheStatusOfTheFailure) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto fail = [](int rank) {
    auto [post, wire] = post_on_wire(rank);
    if (rank == 1) say(wire, {{.kind = Kind::spoken}});
    wire.reset();
    PostProcesses processes(std::move(post));
    processes.fail(ExitStatus::does_not_fit, "why");
  };
  const auto status = ::testing::ExitedWithCode(static_cast<int>(ExitStatus::does_not_fit));
  EXPECT_EXIT(fail(0), status, "^troupe: why \\[....-..-.. ..:..:.. .....\\]\n$");
  EXPECT_EXIT(fail(1), status, "^$");
}

// The other rank closes its connection once it has heard the end, as a rank does.
TEST(PostProcesses, FinishOnceAllHaveEnded) {
  auto [post, wire] = post_on_wire(0);
  say(wire, {{.kind = Kind::ended, .number = ~uint64_t{0}}});
  std::vector<Heard> messages;
  std::thread other([&messages, &wire = wire] {
    wait_for_message(wire);
    messages = heard(wire);
    shutdown(wire.descriptor(), SHUT_WR);
  });
  PostProcesses processes(std::move(post));
  processes.finish();
  other.join();
  ASSERT_EQ(messages.size(), 1U);
  EXPECT_EQ(messages[0].kind, Kind::ended);
  char byte = 0;
  EXPECT_EQ(read(wire.descriptor(), &byte, 1), 0) << "the connection is not closed";
}

// A terminal needs no time: who reads it sees when.
TEST(TimeForLogs, IsThereWhereStandardErrorIsNoTerminal) {
  const int kept = dup(STDERR_FILENO);
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  const int end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  ASSERT_GE(end, 0);
  dup2(end, STDERR_FILENO);
  const std::string at_terminal = time_for_logs();
  const int file = open("/dev/null", O_WRONLY);
  dup2(file, STDERR_FILENO);
  const std::string at_file = time_for_logs();
  dup2(kept, STDERR_FILENO);
  for (const int each : {kept, terminal, end, file}) close(each);
  EXPECT_EQ(at_terminal, "");
  EXPECT_TRUE(
      std::regex_match(at_file, std::regex(R"( \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}\])")))
      << at_file;
}

}  // namespace
}  // namespace troupe
