#include "support/lazy_post.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "base/error.h"

namespace troupe::testing {

// What is under way between the ranks.
class LazyMail {
 public:
  LazyMail(int ranks, uint64_t seed)
      : rank_count_(static_cast<size_t>(ranks)),
        draw_(seed),
        arrived_(rank_count_),
        idle_polls_(rank_count_),
        drops_(rank_count_) {}

  void send_message(int from, int to, std::string bytes) {
    const std::lock_guard lock(mutex_);
    acts(from);
    messages_[{from, to}].push_back(std::move(bytes));
  }

  std::optional<Post::Message> next_message(int to, bool waits) {
    std::unique_lock lock(mutex_);
    std::deque<Post::Message>& arrived = arrived_[static_cast<size_t>(to)];
    if (arrived.empty() && waits) is_idle(to, lock);
    if (is_stuck_) throw_failed("All ranks wait, and nothing is under way.");
    if (arrived.empty()) return std::nullopt;
    acts(to);
    Post::Message message = std::move(arrived.front());
    arrived.pop_front();
    return message;
  }

  Post::Transfer send(int from, int to, int channel, std::span<const Block> blocks) {
    const std::lock_guard lock(mutex_);
    acts(from);
    return begin(lines_[{from, to, channel}].sent, blocks, drops_[static_cast<size_t>(from)]);
  }

  Post::Transfer receive(int from, int to, int channel, std::span<const Block> blocks) {
    const std::lock_guard lock(mutex_);
    acts(to);
    for (const Block& each : blocks) {
      if (each.bytes > 0) std::memset(each.data, kPoison, static_cast<size_t>(each.bytes));
    }
    traffic_.received.push_back({from, to, bytes_of(blocks)});
    return begin(lines_[{from, to, channel}].expected, blocks, drops_[static_cast<size_t>(to)]);
  }

  bool done(int rank, Post::Transfer transfer) {
    const std::lock_guard lock(mutex_);
    EXPECT_LT(states_.at(transfer), State::over) << "a transfer is asked for that is over";
    if (states_[transfer] == State::under_way) return false;
    states_[transfer] = State::over;
    acts(rank);
    return true;
  }

  void drop(int rank) {
    const std::lock_guard lock(mutex_);
    drops_[static_cast<size_t>(rank)] = true;
    for (auto& [between, line] : lines_) {
      if (std::get<0>(between) == rank) line.sent.clear();
      if (std::get<1>(between) == rank) line.expected.clear();
    }
  }

  // The rank does nothing any more, and the others need not wait for it.
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    idle_polls_[static_cast<size_t>(rank)] = kGone;  // others are woken by the clock
  }

  LazyTraffic traffic() {
    const std::lock_guard lock(mutex_);
    for (const auto& [between, line] : lines_) {
      EXPECT_TRUE(line.sent.empty() && line.expected.empty())
          << "rank " << std::get<0>(between) << " has not sent all to rank "
          << std::get<1>(between);
    }
    EXPECT_EQ(std::count(states_.begin(), states_.end(), State::arrived), 0)
        << "transfers that no rank has waited for";
    return std::move(traffic_);
  }

 private:
  static constexpr int kPoison = 0xa5;
  // A rank that looks for messages that often, and does nothing else, waits.
  static constexpr int kWaits = 2;
  static constexpr int kIsStuck = 2000;
  static constexpr int kGone = 1 << 30;

  enum class State { under_way, arrived, over };
  struct Moving {
    Post::Transfer transfer = 0;
    std::vector<Block> blocks;
  };
  struct Line {
    std::deque<Moving> sent;
    std::deque<Moving> expected;
  };

  static int64_t bytes_of(std::span<const Block> blocks) {
    return std::accumulate(blocks.begin(), blocks.end(), int64_t{0},
                           [](int64_t sum, const Block& each) { return sum + each.bytes; });
  }

  Post::Transfer begin(std::deque<Moving>& line, std::span<const Block> blocks, bool dropped) {
    states_.push_back(State::under_way);
    if (!dropped) line.push_back({states_.size() - 1, {blocks.begin(), blocks.end()}});
    return states_.size() - 1;
  }

  void acts(int rank) {
    int& polls = idle_polls_[static_cast<size_t>(rank)];
    if (polls < kGone) polls = 0;
  }

  bool all_have_polled(int times) const {
    return std::all_of(idle_polls_.begin(), idle_polls_.end(),
                       [&](int polls) { return polls >= times; });
  }

  // The rank has found nothing. Returns when it may find something, and now and then: it may wait
  // for what it has found already.
  void is_idle(int rank, std::unique_lock<std::mutex>& lock) {
    const int& polls = ++idle_polls_[static_cast<size_t>(rank)];
    if (all_have_polled(kWaits)) {
      move_one();
    } else if (polls >= kWaits) {
      moved_.wait_for(lock, std::chrono::milliseconds(1), [&] { return polls < kWaits; });
    }
  }

  // All messages, or one transfer.
  void move_one() {
    bool any = false;
    for (auto& [between, messages] : messages_) {
      const auto& [from, to] = between;
      for (; !messages.empty(); messages.pop_front()) {
        arrived_[static_cast<size_t>(to)].push_back({from, std::move(messages.front())});
        acts(to);
        any = true;
      }
    }
    std::vector<std::pair<const std::tuple<int, int, int>, Line>*> lines;
    for (auto& each : lines_) {
      if (!each.second.sent.empty() && !each.second.expected.empty()) lines.push_back(&each);
    }
    if (!any && !lines.empty()) {
      auto& [between, line] = *lines[draw_() % lines.size()];
      copy(line);
      acts(std::get<0>(between));
      acts(std::get<1>(between));
      any = true;
    }
    if (any) moved_.notify_all();
    is_stuck_ = !any && all_have_polled(kIsStuck);
  }

  void copy(Line& line) {
    const Moving sent = std::move(line.sent.front());
    const Moving expected = std::move(line.expected.front());
    line.sent.pop_front();
    line.expected.pop_front();
    states_[sent.transfer] = State::arrived;
    states_[expected.transfer] = State::arrived;
    EXPECT_EQ(bytes_of(sent.blocks), bytes_of(expected.blocks))
        << "a transfer is of another size than is expected";
    std::string bytes;
    for (const Block& each : sent.blocks) {
      bytes.append(static_cast<const char*>(each.data), static_cast<size_t>(each.bytes));
    }
    size_t at = 0;
    for (const Block& each : expected.blocks) {
      at += bytes.copy(static_cast<char*>(each.data), static_cast<size_t>(each.bytes), at);
    }
  }

  std::mutex mutex_;
  std::condition_variable moved_;
  const size_t rank_count_;
  std::mt19937_64 draw_;
  std::map<std::pair<int, int>, std::deque<std::string>> messages_;  // from and to
  std::vector<std::deque<Post::Message>> arrived_;                   // by rank
  std::map<std::tuple<int, int, int>, Line> lines_;                  // from, to, channel
  std::vector<State> states_;                                        // by transfer
  std::vector<int> idle_polls_;                                      // by rank
  std::vector<bool> drops_;                                          // by rank: its transfers
  bool is_stuck_ = false;
  LazyTraffic traffic_;
};

namespace {

// Of the rank of the thread that makes it; other threads that use it wait for nothing.
class LazyPost : public Post {
 public:
  LazyPost(LazyMail& mail, int rank, int ranks) : mail_(mail), waiter_(std::this_thread::get_id()) {
    const auto size = static_cast<size_t>(ranks);
    set_place(rank, std::vector<int32_t>(size, 0), std::vector<std::string>(size));
  }
  ~LazyPost() override { mail_.leave(rank()); }

  void send_message(int to, std::string bytes) override {
    mail_.send_message(rank(), to, std::move(bytes));
  }
  std::optional<Message> next_message() override {
    return mail_.next_message(rank(), std::this_thread::get_id() == waiter_);
  }
  Transfer send(int to, int channel, std::span<const Block> blocks) override {
    return mail_.send(rank(), to, channel, blocks);
  }
  Transfer receive(int from, int channel, std::span<const Block> blocks) override {
    return mail_.receive(from, rank(), channel, blocks);
  }
  bool done(Transfer transfer) override { return mail_.done(rank(), transfer); }
  void drop_transfers() override { mail_.drop(rank()); }
  void finish() override {}
  bool ends_all() const override { return false; }
  void abort(int /*status*/) override {}

 private:
  LazyMail& mail_;
  const std::thread::id waiter_;
};

}  // namespace

LazyTraffic run_lazily(int ranks, uint64_t seed,
                       const std::function<void(int rank, PostGroup& group)>& body) {
  LazyMail mail(ranks, seed);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      LazyPost post(mail, rank, ranks);
      PostGroup group(post, std::chrono::seconds(60), {});
      try {
        body(rank, group);
        group.finish();
      } catch (const UserError& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return mail.traffic();
}

}  // namespace troupe::testing
