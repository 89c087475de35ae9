#include "comm/post/socket_post.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fmt/format.h>
#include <limits>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "comm/collective_messages.h"

namespace troupe {
namespace {

using std::chrono::milliseconds;

// Large transfers are cut into pieces of at most this many bytes: messages wait for one of them.
constexpr int64_t kPiece = 1 << 20;
constexpr size_t kMostBlocks = 64;  // in one call of the system
// After this many bytes of one process the others get their turn.
constexpr int64_t kTurn = 8 << 20;
constexpr const char* kOtherSize = "a tensor of another size than is expected";
// How long the last messages may take to be read by the others, when all is well and otherwise.
constexpr milliseconds kFarewell{10'000};
constexpr milliseconds kHastyFarewell{1'000};

enum class FrameKind : uint32_t {
  message,
  small,     // a whole transfer
  expected,  // the receiver waits for a large transfer
  piece,     // of a large transfer
};

struct FrameHead {
  FrameKind kind = FrameKind::message;
  int32_t channel = 0;
  uint64_t bytes = 0;  // that follow; expected: of the transfer
};

// Where a transfer has come to in its blocks.
struct Cursor {
  std::vector<Block> blocks;
  size_t block = 0;
  int64_t offset = 0;
  int64_t left = 0;

  explicit Cursor(std::span<const Block> all) : blocks(all.begin(), all.end()) {
    for (const Block& each : blocks) left += each.bytes;
  }

  // The next blocks, at most `bytes` in all and as many as fit after those of `list`.
  void append_to(std::vector<iovec>& list, int64_t bytes) const {
    bytes = std::min(bytes, left);
    int64_t at = offset;
    for (size_t i = block; bytes > 0 && list.size() < kMostBlocks; ++i, at = 0) {
      const int64_t count = std::min(bytes, blocks[i].bytes - at);
      if (count == 0) continue;
      list.push_back({static_cast<std::byte*>(blocks[i].data) + at, static_cast<size_t>(count)});
      bytes -= count;
    }
  }

  void advance(int64_t bytes) {
    left -= bytes;
    while (bytes > 0) {
      const int64_t count = std::min(bytes, blocks[block].bytes - offset);
      offset += count;
      bytes -= count;
      if (offset < blocks[block].bytes) break;
      ++block;
      offset = 0;
    }
  }

  void copy_to(std::byte* target, int64_t bytes) {
    std::vector<iovec> list;
    for (; bytes > 0; list.clear()) {
      append_to(list, bytes);
      for (const iovec& each : list) {
        std::memcpy(target, each.iov_base, each.iov_len);
        target += each.iov_len;
        bytes -= static_cast<int64_t>(each.iov_len);
        advance(static_cast<int64_t>(each.iov_len));
      }
    }
  }

  void copy_from(const std::byte* source, int64_t bytes) {
    std::vector<iovec> list;
    for (; bytes > 0; list.clear()) {
      append_to(list, bytes);
      for (const iovec& each : list) {
        std::memcpy(each.iov_base, source, each.iov_len);
        source += each.iov_len;
        bytes -= static_cast<int64_t>(each.iov_len);
        advance(static_cast<int64_t>(each.iov_len));
      }
    }
  }
};

struct Sending {
  Cursor cursor;
  int32_t channel = 0;
  Post::Transfer transfer = 0;
  bool is_small = false;
  bool is_expected = false;
};

struct Receiving {
  Cursor cursor;
  int64_t bytes = 0;
  Post::Transfer transfer = 0;
};

// A frame on its way out: bytes of its own, then some of the transfer that is being sent.
struct Outgoing {
  std::string bytes;
  size_t written = 0;
  bool is_of_transfer = false;
  int64_t left_of_transfer = 0;
};

std::string head_bytes(FrameKind kind, int32_t channel, int64_t bytes) {
  const FrameHead head{.kind = kind, .channel = channel, .bytes = static_cast<uint64_t>(bytes)};
  std::string text(sizeof(head), '\0');
  std::memcpy(text.data(), &head, sizeof(head));
  return text;
}

// The other end of a connection.
struct Peer {
  Socket socket;
  bool is_watched_for_writing = false;
  bool takes_frames = true;

  // To it. Frames go out in their order; the last of them may carry bytes of sending.front().
  std::deque<Outgoing> frames;
  std::deque<Sending> sending;
  std::unordered_map<int32_t, int> expected;  // by channel: how many large transfers it waits for

  // From it.
  std::array<std::byte, sizeof(FrameHead)> begun = {};  // a head of which the rest is to come
  size_t begun_bytes = 0;
  bool in_frame = false;
  FrameHead head;
  int64_t left = 0;             // of the frame
  Receiving* target = nullptr;  // where it goes, if it is a transfer that is expected
  std::string text;             // where else it goes
  std::unordered_map<int32_t, std::deque<Receiving>> receiving;
  std::unordered_map<int32_t, std::deque<std::string>> early;
};

}  // namespace

class SocketPost::State {
 public:
  State(const Post& post, int rank, std::vector<Socket> sockets, size_t buffer)
      : post_(post),
        rank_(rank),
        peers_(sockets.size()),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        buffer_(buffer) {
    if (!epoll_) throw_failed("Ranks cannot exchange messages: the system has no epoll for them.");
    for (size_t i = 0; i < sockets.size(); ++i) {
      peers_[i].socket = std::move(sockets[i]);
      peers_[i].takes_frames = static_cast<bool>(peers_[i].socket);
      if (!peers_[i].socket) continue;
      epoll_event event = {.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(i)}};
      epoll_ctl(epoll_.descriptor(), EPOLL_CTL_ADD, peers_[i].socket.descriptor(), &event);
    }
  }

  void send_message(int to, std::string_view bytes) {
    Peer& peer = at(to);
    std::string frame = head_bytes(FrameKind::message, 0, static_cast<int64_t>(bytes.size()));
    frame += bytes;
    send_frame(peer, std::move(frame));
  }

  std::optional<Message> next_message() {
    if (messages_.empty()) progress(0);
    if (messages_.empty()) return std::nullopt;
    Message message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }

  Transfer send(int to, int channel, std::span<const Block> blocks) {
    const Transfer transfer = new_transfer();
    Peer& peer = at(to);
    if (!peer.takes_frames || dropping_) return transfer;
    Cursor cursor(blocks);
    const bool is_small = cursor.left <= kSmallTransfer;
    peer.sending.push_back({.cursor = std::move(cursor),
                            .channel = channel,
                            .transfer = transfer,
                            .is_small = is_small});
    write(peer);
    return transfer;
  }

  Transfer receive(int from, int channel, std::span<const Block> blocks) {
    const Transfer transfer = new_transfer();
    Peer& peer = at(from);
    if (dropping_) return transfer;
    Receiving receiving{.cursor = Cursor(blocks), .bytes = 0, .transfer = transfer};
    receiving.bytes = receiving.cursor.left;
    if (const auto early = peer.early.find(channel); early != peer.early.end()) {
      const std::string bytes = std::move(early->second.front());
      early->second.pop_front();
      if (early->second.empty()) peer.early.erase(early);
      require(peer, static_cast<int64_t>(bytes.size()) == receiving.bytes, kOtherSize);
      receiving.cursor.copy_from(reinterpret_cast<const std::byte*>(bytes.data()), receiving.bytes);
      transfers_[transfer].is_done = true;
      return transfer;
    }
    const bool is_large = receiving.bytes > kSmallTransfer;
    const int64_t bytes = receiving.bytes;
    peer.receiving[channel].push_back(std::move(receiving));
    if (is_large) send_frame(peer, head_bytes(FrameKind::expected, channel, bytes));
    return transfer;
  }

  bool done(Transfer transfer) {
    TROUPE_CHECK(transfers_[transfer].in_use, "a transfer that is over");
    if (!transfers_[transfer].is_done) progress(0);
    if (!transfers_[transfer].is_done) return false;
    transfers_[transfer].in_use = false;
    free_.push_back(transfer);
    return true;
  }

  // Frames that are begun are completed, from a copy.
  void drop_transfers() {
    if (std::exchange(dropping_, true)) return;
    for (Peer& peer : peers_) {
      for (Outgoing& frame : peer.frames) {
        if (!std::exchange(frame.is_of_transfer, false)) continue;
        const size_t own = frame.bytes.size();
        frame.bytes.resize(own + static_cast<size_t>(frame.left_of_transfer));
        peer.sending.front().cursor.copy_to(reinterpret_cast<std::byte*>(frame.bytes.data() + own),
                                            frame.left_of_transfer);
        frame.left_of_transfer = 0;
      }
      peer.sending.clear();
      peer.target = nullptr;
      peer.receiving.clear();
      peer.early.clear();
    }
  }

  std::optional<int32_t> next_gone() {
    if (gone_.empty()) return std::nullopt;
    const int32_t rank = gone_.front();
    gone_.pop_front();
    return rank;
  }

  // Sends what is left, and waits until all have read it and closed their connections, too.
  void part(milliseconds limit) {
    drop_transfers();
    const auto end = SocketClock::now() + limit;
    for (;;) {
      bool any = false;
      for (Peer& peer : peers_) {
        if (!peer.socket) continue;
        any = true;
        if (!peer.frames.empty() || !std::exchange(peer.takes_frames, false)) continue;
        shutdown(peer.socket.descriptor(), SHUT_WR);
      }
      const auto left = std::chrono::duration_cast<milliseconds>(end - SocketClock::now()).count();
      if (!any || left <= 0) return;
      progress(static_cast<int>(left));
    }
  }

 private:
  struct TransferState {
    bool in_use = false;
    bool is_done = false;
  };

  // What the other end has sent must be so; otherwise nothing of it is read any more.
  void require(Peer& peer, bool fits, const char* problem) {
    if (fits) return;
    const auto rank = static_cast<size_t>(&peer - peers_.data());
    peer.in_frame = false;
    peer.target = nullptr;
    lose(peer);
    throw_failed(fmt::format("Rank {} does not understand what {} sends: {}. All ranks end.", rank_,
                             rank_name(static_cast<int32_t>(rank), post_.process_of_rank()[rank]),
                             problem));
  }

  Peer& at(int rank) {
    TROUPE_CHECK(rank != rank_, "a rank that writes to itself");
    return peers_[static_cast<size_t>(rank)];
  }

  Transfer new_transfer() {
    if (free_.empty()) {
      free_.push_back(transfers_.size());
      transfers_.emplace_back();
    }
    const Transfer transfer = free_.back();
    free_.pop_back();
    transfers_[transfer] = {.in_use = true, .is_done = false};
    return transfer;
  }

  // Moves what can be moved. Waits for something that can be for at most `wait_ms`.
  void progress(int wait_ms) {
    std::array<epoll_event, 64> events = {};
    const int count = epoll_wait(epoll_.descriptor(), events.data(), events.size(), wait_ms);
    for (int i = 0; i < count; ++i) {
      Peer& peer = peers_[events[static_cast<size_t>(i)].data.u32];
      const uint32_t what = events[static_cast<size_t>(i)].events;
      if ((what & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read(peer);
      if ((what & EPOLLOUT) != 0) write(peer);
    }
  }

  void lose(Peer& peer) {
    if (!peer.socket) return;
    stop_writing(peer);
    peer.socket.reset();  // which ends watching it, too
    gone_.push_back(static_cast<int32_t>(&peer - peers_.data()));
  }

  void stop_writing(Peer& peer) {
    peer.takes_frames = false;
    peer.frames.clear();
    peer.sending.clear();
  }

  void watch_for_writing(Peer& peer, bool watched) {
    if (std::exchange(peer.is_watched_for_writing, watched) == watched) return;
    const auto what = static_cast<uint32_t>(EPOLLIN) | (watched ? EPOLLOUT : 0U);
    epoll_event event = {.events = what,
                         .data = {.u32 = static_cast<uint32_t>(&peer - peers_.data())}};
    epoll_ctl(epoll_.descriptor(), EPOLL_CTL_MOD, peer.socket.descriptor(), &event);
  }

  void send_frame(Peer& peer, std::string bytes) {
    if (!peer.takes_frames) return;
    peer.frames.push_back({.bytes = std::move(bytes)});
    // Frames before it wait for the socket.
    if (peer.frames.size() == 1) write(peer);
  }

  // The next piece of a transfer that may go: the first of its channel, and expected if it is
  // large. It comes to the front.
  bool begin_piece(Peer& peer) {
    std::vector<int32_t> channels;
    for (auto each = peer.sending.begin(); each != peer.sending.end(); ++each) {
      if (std::find(channels.begin(), channels.end(), each->channel) != channels.end()) continue;
      channels.push_back(each->channel);
      if (!each->is_small && !each->is_expected) {
        const auto expected = peer.expected.find(each->channel);
        if (expected == peer.expected.end()) continue;
        if (--expected->second == 0) peer.expected.erase(expected);
        each->is_expected = true;
      }
      std::rotate(peer.sending.begin(), each, each + 1);
      const Sending& first = peer.sending.front();
      const int64_t bytes =
          first.is_small ? first.cursor.left : std::min(kPiece, first.cursor.left);
      const FrameKind kind = first.is_small ? FrameKind::small : FrameKind::piece;
      peer.frames.push_back({.bytes = head_bytes(kind, first.channel, bytes),
                             .is_of_transfer = true,
                             .left_of_transfer = bytes});
      return true;
    }
    return false;
  }

  // As much as the connection takes.
  void write(Peer& peer) {
    std::vector<iovec> list;
    while (!peer.frames.empty() || begin_piece(peer)) {
      list.clear();
      int64_t wanted = 0;
      for (Outgoing& frame : peer.frames) {
        if (list.size() + 1 >= kMostBlocks) break;
        list.push_back({frame.bytes.data() + frame.written, frame.bytes.size() - frame.written});
        if (!frame.is_of_transfer) continue;
        peer.sending.front().cursor.append_to(list, frame.left_of_transfer);
        break;  // its blocks may be more than the list takes
      }
      for (const iovec& each : list) wanted += static_cast<int64_t>(each.iov_len);
      msghdr message = {};
      message.msg_iov = list.data();
      message.msg_iovlen = list.size();
      const ssize_t sent = sendmsg(peer.socket.descriptor(), &message, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      // What it has said last is still to be read.
      if (sent < 0 && errno != EAGAIN) return stop_writing(peer);
      if (sent > 0) take_written(peer, sent);
      if (sent < wanted) return watch_for_writing(peer, true);
    }
    watch_for_writing(peer, false);
  }

  void take_written(Peer& peer, int64_t count) {
    while (!peer.frames.empty()) {
      Outgoing& frame = peer.frames.front();
      const auto own = std::min(count, static_cast<int64_t>(frame.bytes.size() - frame.written));
      frame.written += static_cast<size_t>(own);
      count -= own;
      if (frame.written < frame.bytes.size()) return;
      if (frame.is_of_transfer) {
        Sending& sending = peer.sending.front();
        const int64_t of_transfer = std::min(count, frame.left_of_transfer);
        sending.cursor.advance(of_transfer);
        frame.left_of_transfer -= of_transfer;
        count -= of_transfer;
        if (frame.left_of_transfer > 0) return;
        if (sending.cursor.left == 0) {
          transfers_[sending.transfer].is_done = true;
          peer.sending.pop_front();
        }
      }
      peer.frames.pop_front();
    }
  }

  void read(Peer& peer) {
    for (int64_t taken = 0; peer.socket && taken < kTurn;) {
      std::vector<iovec> list;
      int64_t straight = 0;
      if (peer.target != nullptr) {
        peer.target->cursor.append_to(list, peer.left);
        for (const iovec& each : list) straight += static_cast<int64_t>(each.iov_len);
      }
      std::copy_n(peer.begun.begin(), peer.begun_bytes, buffer_.begin());
      const size_t held = std::exchange(peer.begun_bytes, 0);
      // After the frame only if the list holds all that is left of it.
      const size_t room = straight == 0 || straight == peer.left ? buffer_.size() - held : 0;
      if (room > 0) list.push_back({buffer_.data() + held, room});
      msghdr message = {};
      message.msg_iov = list.data();
      message.msg_iovlen = list.size();
      const ssize_t received = recvmsg(peer.socket.descriptor(), &message, 0);
      if (received < 0 && (errno == EINTR || errno == EAGAIN)) {
        peer.begun_bytes = held;
        if (errno == EINTR) continue;
        return;
      }
      if (received <= 0) return lose(peer);
      taken += received;
      const int64_t into_target = std::min<int64_t>(received, straight);
      if (into_target > 0) {
        peer.target->cursor.advance(into_target);
        peer.left -= into_target;
        if (peer.left == 0) finish_frame(peer);
      }
      const auto buffered = static_cast<size_t>(received - into_target);
      if (buffered > 0) parse(peer, {buffer_.data(), held + buffered});
      if (received < straight + static_cast<int64_t>(room)) return;  // that was all
    }
  }

  void parse(Peer& peer, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      size_t count = sizeof(FrameHead);
      if (!peer.in_frame) {
        if (bytes.size() < count) {
          std::copy(bytes.begin(), bytes.end(), peer.begun.begin());
          peer.begun_bytes = bytes.size();
          return;
        }
        std::memcpy(&peer.head, bytes.data(), count);
        begin_frame(peer);
      } else {
        count = static_cast<size_t>(std::min(static_cast<int64_t>(bytes.size()), peer.left));
        take(peer, bytes.first(count));
      }
      bytes = bytes.subspan(count);
    }
  }

  // Some of the frame's bytes.
  void take(Peer& peer, std::span<const std::byte> bytes) {
    const auto count = static_cast<int64_t>(bytes.size());
    if (peer.target != nullptr) {
      peer.target->cursor.copy_from(bytes.data(), count);
    } else if (!dropping_ || peer.head.kind == FrameKind::message) {
      peer.text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    peer.left -= count;
    if (peer.left == 0) finish_frame(peer);
  }

  // Of the head, before anything is done with it.
  void check_head(Peer& peer) {
    const FrameHead& head = peer.head;
    require(peer, head.kind <= FrameKind::piece, "a frame of no kind");
    require(peer, head.channel >= 0 && head.channel < kChannels, "a frame of no channel");
    const std::array<int64_t, 4> longest = {kLongestMessage, kSmallTransfer,
                                            std::numeric_limits<int64_t>::max(), kPiece};
    require(peer, head.bytes <= static_cast<uint64_t>(longest[static_cast<size_t>(head.kind)]),
            "a frame that is too long");
  }

  void begin_frame(Peer& peer) {
    check_head(peer);
    const FrameHead& head = peer.head;
    if (head.kind == FrameKind::expected) {
      ++peer.expected[head.channel];
      write(peer);
      return;
    }
    peer.in_frame = true;
    peer.left = static_cast<int64_t>(head.bytes);
    peer.target = nullptr;
    peer.text.clear();
    if (head.kind != FrameKind::message && !dropping_) {
      const auto receiving = peer.receiving.find(head.channel);
      if (receiving != peer.receiving.end()) peer.target = &receiving->second.front();
      require(peer,
              head.kind == FrameKind::piece
                  ? peer.target != nullptr && peer.left <= peer.target->cursor.left &&
                        peer.target->bytes > kSmallTransfer
                  : peer.target == nullptr || peer.left == peer.target->bytes,
              kOtherSize);
    }
    if (peer.left == 0) finish_frame(peer);
  }

  void finish_frame(Peer& peer) {
    peer.in_frame = false;
    const int32_t channel = peer.head.channel;
    if (peer.head.kind == FrameKind::message) {
      messages_.push_back(
          {.from = static_cast<int32_t>(&peer - peers_.data()), .bytes = std::move(peer.text)});
    } else if (peer.target != nullptr) {
      if (std::exchange(peer.target, nullptr)->cursor.left > 0) return;
      finish_receiving(peer, channel);
    } else if (const auto late = peer.receiving.find(channel); late != peer.receiving.end()) {
      // It has come to be expected while it came.
      Receiving& receiving = late->second.front();
      require(peer, static_cast<int64_t>(peer.text.size()) == receiving.bytes, kOtherSize);
      receiving.cursor.copy_from(reinterpret_cast<const std::byte*>(peer.text.data()),
                                 receiving.bytes);
      finish_receiving(peer, channel);
    } else if (!dropping_) {
      peer.early[channel].push_back(std::move(peer.text));
    }
    peer.text = {};
  }

  // The first of a channel that was expected is there.
  void finish_receiving(Peer& peer, int32_t channel) {
    const auto receiving = peer.receiving.find(channel);
    transfers_[receiving->second.front().transfer].is_done = true;
    receiving->second.pop_front();
    if (receiving->second.empty()) peer.receiving.erase(receiving);
  }

  const Post& post_;
  const int rank_;
  std::vector<Peer> peers_;  // by rank; this one's is empty
  Socket epoll_;
  std::vector<std::byte> buffer_;  // while something is read
  std::deque<Message> messages_;
  std::deque<int32_t> gone_;
  std::vector<TransferState> transfers_;
  std::vector<Transfer> free_;
  bool dropping_ = false;
};

SocketPost::SocketPost(int rank, Connections connections, size_t buffer) {
  const size_t size = connections.sockets.size();
  connections.process_of_rank.resize(size);
  set_place(rank, std::move(connections.machine_of_rank), std::move(connections.process_of_rank));
  state_ = std::make_unique<State>(*this, rank, std::move(connections.sockets), buffer);
}

SocketPost::~SocketPost() = default;

void SocketPost::send_message(int to, std::string bytes) {
  state_->send_message(to, bytes);
}

std::optional<Post::Message> SocketPost::next_message() {
  return state_->next_message();
}

Post::Transfer SocketPost::send(int to, int channel, std::span<const Block> blocks) {
  return state_->send(to, channel, blocks);
}

Post::Transfer SocketPost::receive(int from, int channel, std::span<const Block> blocks) {
  return state_->receive(from, channel, blocks);
}

bool SocketPost::done(Transfer transfer) {
  return state_->done(transfer);
}

void SocketPost::drop_transfers() {
  state_->drop_transfers();
}

std::optional<int32_t> SocketPost::next_gone() {
  return state_->next_gone();
}

void SocketPost::finish() {
  state_->part(kFarewell);
}

void SocketPost::abort(int /*status*/) {
  state_->part(kHastyFarewell);
}

}  // namespace troupe
