#include "comm/thread_group.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "comm/collective_messages.h"
#include "comm/ordered_sum.h"
#include "program/shard.h"

namespace troupe {
namespace {

constexpr int64_t kCopyGrain = int64_t{1} << 18;  // bytes

// What one rank shows the others of its group during a call.
struct Shown {
  std::span<const TensorView> tensors;
  std::span<const Block> sent;  // or its windows
};

}  // namespace

// The ranks that have one communicator in common, and where they meet. Guarded by the group's
// mutex, except for what is shown while all are between begin and end.
class ThreadGroup::Room {
 public:
  Room(ThreadGroup& group, std::vector<int32_t> ranks);

  Communicator& member(int rank);
  size_t place_of(int rank) const {
    return static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  }

  int32_t rank_at(size_t place) const { return ranks_[place]; }
  std::chrono::milliseconds limit() const { return group_.limit(); }

  // What a barrier is for.
  enum class Barrier : uint8_t {
    begin_collective,  // limited; all must call the same
    end_collective,    // all are there and only compute: never limited
    exchange,          // without limit
  };
  void begin(size_t place, const CollectiveCall& call, Shown shown);
  void end(size_t place);
  std::vector<uint64_t> exchange(size_t place, uint64_t value);
  std::vector<std::string> gather(size_t place, std::string bytes);

  void send(size_t from, size_t to, const CollectiveCall& call, const TensorView& tensor);
  void finish_send(size_t from, size_t to, const CollectiveCall& call);
  void receive(size_t from, size_t to, const CollectiveCall& call, const TensorView& tensor);

  void wake() { changed_.notify_all(); }
  // What to say when `rank` has left while others wait for it; empty: none does.
  std::string message_of_leaver(int rank) const;

  const Shown& shown(size_t place) const { return slots_[place].shown; }

 private:
  class Member;
  // What a rank has in hand.
  struct Slot {
    Barrier barrier = Barrier::exchange;  // the last one
    CollectiveCall call;                  // op is null outside of a program
    Shown shown;
    uint64_t value = 0;  // of exchange()
    std::string bytes;   // of gather()
    bool waits = false;
    int waits_for = -1;  // the place of the only rank that is waited for; -1: for all
    // Of a wait for one rank: is it over, though the waiting thread may not have noticed yet?
    std::function<bool()> done;
  };
  struct Message {
    CollectiveCall call;
    TensorView tensor;
  };
  // Messages from one rank to another.
  struct Mailbox {
    std::deque<Message> sent;  // and not received
    uint64_t received = 0;     // how many ever
    uint64_t finished = 0;     // how many the sender knows to be received
  };

  Mailbox& mailbox(size_t from, size_t to) { return mailboxes_[from * ranks_.size() + to]; }
  // Waits until all ranks are here, or throws. Gives up the lock first, then wakes the others,
  // which would otherwise wake to wait for it.
  void pass_barrier(std::unique_lock<std::mutex> lock, size_t place, Barrier barrier);
  // Waits within the limit for one other rank, until `done`, or throws.
  template <class Done>
  void wait_for(std::unique_lock<std::mutex>& lock, size_t place, size_t other,
                const CollectiveCall& call, const Done& done);
  // Empty when all ranks meet for the same and call the same. While they are all waiting: their
  // tensors are looked at.
  std::string mismatch() const;
  std::string missing(size_t place) const;
  RankCall call_of(size_t place) const;
  [[noreturn]] void fail(const std::string& message);

  ThreadGroup& group_;
  const std::vector<int32_t> ranks_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;  // by place
  std::vector<Mailbox> mailboxes_;
  size_t arrived_ = 0;
  uint64_t round_ = 0;  // barriers that were complete
  std::vector<std::unique_ptr<Member>> members_;
};

class ThreadGroup::Room::Member : public Communicator {
 public:
  Member(Room& room, size_t place, size_t size) : room_(room), place_(place), size_(size) {}

  int rank() const override { return static_cast<int>(place_); }
  int size() const override { return static_cast<int>(size_); }
  int32_t rank_at(int place) const override { return room_.rank_at(static_cast<size_t>(place)); }
  std::chrono::milliseconds limit() const override { return room_.limit(); }

  void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                  ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t i = 0; i < tensors.size(); ++i) sum_tensor(tensors[i], i, i, pool);
    room_.end(place_);
  }

  // A rank writes its own shards only, and no other rank reads them.
  void reduce_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     std::span<const int16_t> owners, ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t i = 0; i < tensors.size(); ++i) {
      const IndexRange own = shard_of(tensors[i].shape, shard_at(place_, owner_of(owners, i)));
      with_sum_types(tensors[i].dtype,
                     [&]<class T, class Sum>() { sum_shard<T, Sum>(i, own, pool); });
    }
    room_.end(place_);
  }

  // A rank writes what is not its own, and the others read its own.
  void gather_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     std::span<const int16_t> owners, ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t place = 0; place < size_; ++place) {
      if (place == place_) continue;
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto size = static_cast<int64_t>(size_of(tensors[i].dtype));
        const IndexRange shard = shard_of(tensors[i].shape, shard_at(place, owner_of(owners, i)));
        const auto* source = static_cast<const std::byte*>(room_.shown(place).tensors[i].data);
        copy(static_cast<std::byte*>(tensors[i].data) + shard.begin * size,
             source + shard.begin * size, (shard.end - shard.begin) * size, pool);
      }
    }
    room_.end(place_);
  }

  void sum(const CollectiveCall& call, const TensorView& own, const TensorView& result,
           ThreadPool& pool) override {
    const std::array tensors = {own, result};
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    sum_tensor(own, 0, 1, pool);
    room_.end(place_);
  }

  void reduce_scatter(const CollectiveCall& call, const TensorView& own, const TensorView& result,
                      ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = {&own, 1}, .sent = {}});
    with_sum_types(own.dtype, [&]<class T, class Sum>() { scatter_sum<T, Sum>(result, pool); });
    room_.end(place_);
  }

  void all_gather(const CollectiveCall& call, const TensorView& own, const TensorView& gathered,
                  ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = {&own, 1}, .sent = {}});
    const int64_t bytes = own.shape.elements() * static_cast<int64_t>(size_of(own.dtype));
    auto* target = static_cast<std::byte*>(gathered.data);
    for (size_t place = 0; place < size_; ++place) {
      copy(target + static_cast<int64_t>(place) * bytes, room_.shown(place).tensors[0].data, bytes,
           pool);
    }
    room_.end(place_);
  }

  void all_to_all(const CollectiveCall& call, std::span<const Block> sent,
                  std::span<const Block> received, ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = {}, .sent = sent});
    for (size_t place = 0; place < size_; ++place) {
      const Block& source = room_.shown(place).sent[place_];
      const Block& target = received[place];
      TROUPE_CHECK(source.bytes == target.bytes, "all_to_all: more or less than is expected");
      copy(target.data, source.data, target.bytes, pool);
    }
    room_.end(place_);
  }

  void open(const CollectiveCall& call, std::span<const Block> windows) override {
    room_.begin(place_, call, {.tensors = {}, .sent = windows});
  }
  void put(int member, size_t window, int64_t offset, Block bytes) override {
    const Block& target = room_.shown(static_cast<size_t>(member)).sent[window];
    const int64_t section = target.bytes / size();
    std::memcpy(static_cast<std::byte*>(target.data) + rank() * section + offset, bytes.data,
                static_cast<size_t>(bytes.bytes));
  }
  void close() override { room_.end(place_); }

  void prefix_sum(const CollectiveCall& call, const TensorView& own, const TensorView& running,
                  const TensorView& total) override {
    room_.begin(place_, call, {.tensors = {&own, 1}, .sent = {}});
    sum_counts(
        size(), rank(), static_cast<size_t>(own.shape.elements()),
        [&](int place) { return room_.shown(static_cast<size_t>(place)).tensors[0].as<int32_t>(); },
        running.as<int32_t>(), total.as<int32_t>());
    room_.end(place_);
  }

  void send(const CollectiveCall& call, const TensorView& tensor, int to) override {
    room_.send(place_, static_cast<size_t>(to), call, tensor);
  }
  void finish_send(const CollectiveCall& call, int to) override {
    room_.finish_send(place_, static_cast<size_t>(to), call);
  }
  void receive(const CollectiveCall& call, const TensorView& tensor, int from) override {
    room_.receive(static_cast<size_t>(from), place_, call, tensor);
  }

 private:
  static void copy(void* target, const void* source, int64_t bytes, ThreadPool& pool) {
    pool.parallel_ranges(bytes, kCopyGrain, [&](int64_t begin, int64_t end, int) {
      std::memcpy(static_cast<std::byte*>(target) + begin,
                  static_cast<const std::byte*>(source) + begin, static_cast<size_t>(end - begin));
    });
  }

  // This rank's share of the sums of tensor `source` of all ranks, into tensor `result` of each.
  void sum_tensor(const TensorView& tensor, size_t source, size_t result, ThreadPool& pool) {
    const IndexRange share = share_of(tensor.shape.elements(), rank(), size());
    with_sum_types(tensor.dtype, [&]<class T, class Sum>() {
      const auto tensor_of = [&](size_t which) {
        return [this, which](size_t place) { return room_.shown(place).tensors[which].as<T>(); };
      };
      sum_elements<T, Sum>(size_, tensor_of(source), size_, tensor_of(result), share, pool);
    });
  }

  Shard shard_at(size_t place, int32_t owner) const {
    return {
        .place = static_cast<int32_t>(place), .count = static_cast<int32_t>(size_), .owner = owner};
  }

  // The elements `shard` of tensor `which` of all ranks, into this rank's.
  template <class T, class Sum>
  void sum_shard(size_t which, const IndexRange& shard, ThreadPool& pool) {
    const TensorView& own = room_.shown(place_).tensors[which];
    const auto source = [&](size_t place) {
      return room_.shown(place).tensors[which].as<T>() + shard.begin;
    };
    sum_elements<T, Sum>(
        size_, source, 1, [&](size_t) { return own.as<T>() + shard.begin; },
        {0, shard.end - shard.begin}, pool);
  }

  template <class T, class Sum>
  void scatter_sum(const TensorView& result, ThreadPool& pool) {
    const int64_t elements = result.shape.elements();
    const auto source = [&](size_t place) {
      return room_.shown(place).tensors[0].as<T>() + static_cast<int64_t>(place_) * elements;
    };
    sum_elements<T, Sum>(
        size_, source, 1, [&](size_t) { return result.as<T>(); }, {0, elements}, pool);
  }

  Room& room_;
  const size_t place_;
  const size_t size_;
};

ThreadGroup::Room::Room(ThreadGroup& group, std::vector<int32_t> ranks)
    : group_(group),
      ranks_(std::move(ranks)),
      slots_(ranks_.size()),
      mailboxes_(ranks_.size() * ranks_.size()) {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    members_.push_back(std::make_unique<Member>(*this, place, ranks_.size()));
  }
}

Communicator& ThreadGroup::Room::member(int rank) {
  return *members_[place_of(rank)];
}

void ThreadGroup::Room::pass_barrier(std::unique_lock<std::mutex> lock, size_t place,
                                     Barrier barrier) {
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  Slot& slot = slots_[place];
  slot.waits = true;
  slot.waits_for = -1;
  slot.barrier = barrier;
  if (++arrived_ == ranks_.size()) {
    const std::string difference = mismatch();
    if (!difference.empty()) fail(difference);
    arrived_ = 0;
    ++round_;
    for (Slot& each : slots_) each.waits = false;
    lock.unlock();
    changed_.notify_all();
    return;
  }
  for (const int32_t rank : ranks_) {
    if (group_.left_[static_cast<size_t>(rank)]) fail(missing(place));
  }
  const uint64_t round = round_;
  const auto over = [&] { return round_ != round || group_.failure_ != nullptr; };
  if (barrier != Barrier::begin_collective) {
    changed_.wait(lock, over);
  } else if (!changed_.wait_for(lock, group_.limit(), over)) {
    fail(missing(place));
  }
  if (round_ == round) std::rethrow_exception(group_.failure_);
}

std::vector<uint64_t> ThreadGroup::Room::exchange(size_t place, uint64_t value) {
  std::unique_lock lock(group_.mutex_);
  Slot& slot = slots_[place];
  slot.call = {};
  slot.shown = {};
  slot.value = value;
  pass_barrier(std::move(lock), place, Barrier::exchange);
  std::vector<uint64_t> values;
  for (const Slot& each : slots_) values.push_back(each.value);
  // No rank may write the next number before all have read these.
  pass_barrier(std::unique_lock(group_.mutex_), place, Barrier::exchange);
  return values;
}

std::vector<std::string> ThreadGroup::Room::gather(size_t place, std::string bytes) {
  std::unique_lock lock(group_.mutex_);
  Slot& slot = slots_[place];
  slot.call = {};
  slot.shown = {};
  slot.bytes = std::move(bytes);
  pass_barrier(std::move(lock), place, Barrier::exchange);
  std::vector<std::string> all;
  if (place == 0) {
    for (Slot& each : slots_) all.push_back(std::move(each.bytes));
  }
  pass_barrier(std::unique_lock(group_.mutex_), place, Barrier::exchange);
  return all;
}

void ThreadGroup::Room::begin(size_t place, const CollectiveCall& call, Shown shown) {
  std::unique_lock lock(group_.mutex_);
  Slot& slot = slots_[place];
  slot.call = call;
  slot.shown = shown;
  pass_barrier(std::move(lock), place, Barrier::begin_collective);
}

void ThreadGroup::Room::end(size_t place) {
  pass_barrier(std::unique_lock(group_.mutex_), place, Barrier::end_collective);
}

template <class Done>
void ThreadGroup::Room::wait_for(std::unique_lock<std::mutex>& lock, size_t place, size_t other,
                                 const CollectiveCall& call, const Done& done) {
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  if (done()) return;
  Slot& slot = slots_[place];
  slot.call = call;
  slot.waits = true;
  slot.waits_for = static_cast<int>(other);
  slot.done = done;
  if (group_.left_[static_cast<size_t>(ranks_[other])]) fail(missing(place));
  const auto over = [&] { return done() || group_.failure_ != nullptr; };
  const bool in_time = changed_.wait_for(lock, group_.limit(), over);
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  if (!in_time) fail(missing(place));
  slot.waits = false;
}

void ThreadGroup::Room::send(size_t from, size_t to, const CollectiveCall& call,
                             const TensorView& tensor) {
  std::unique_lock lock(group_.mutex_);
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  mailbox(from, to).sent.push_back({call, tensor});
  lock.unlock();
  changed_.notify_all();
}

void ThreadGroup::Room::finish_send(size_t from, size_t to, const CollectiveCall& call) {
  std::unique_lock lock(group_.mutex_);
  Mailbox& box = mailbox(from, to);
  const uint64_t number = ++box.finished;
  wait_for(lock, from, to, call, [&] { return box.received >= number; });
}

void ThreadGroup::Room::receive(size_t from, size_t to, const CollectiveCall& call,
                                const TensorView& tensor) {
  std::unique_lock lock(group_.mutex_);
  Mailbox& box = mailbox(from, to);
  wait_for(lock, to, from, call, [&] { return !box.sent.empty(); });
  const Message message = box.sent.front();
  if (!same_type(message.tensor, tensor)) {
    fail(wrong_type_message({ranks_[from], site_of(message.call), {&message.tensor, 1}},
                            {ranks_[to], site_of(call), {&tensor, 1}}));
  }
  // The sender leaves its tensor alone until it knows that this is done.
  lock.unlock();
  std::memcpy(tensor.data, message.tensor.data,
              static_cast<size_t>(tensor.shape.elements()) * size_of(tensor.dtype));
  lock.lock();
  box.sent.pop_front();
  ++box.received;
  lock.unlock();
  changed_.notify_all();
}

RankCall ThreadGroup::Room::call_of(size_t place) const {
  return {ranks_[place], site_of(slots_[place].call), slots_[place].shown.tensors};
}

std::string ThreadGroup::Room::mismatch() const {
  for (size_t place = 1; place < slots_.size(); ++place) {
    if (slots_.front().barrier == slots_[place].barrier && same_call(call_of(0), call_of(place))) {
      continue;
    }
    return mismatch_message(call_of(0), call_of(place));
  }
  return {};
}

std::string ThreadGroup::Room::missing(size_t place) const {
  const Slot& slot = slots_[place];
  std::vector<AbsentRank> absent;
  for (size_t other = 0; other < slots_.size(); ++other) {
    const bool is_here = slots_[other].waits && slots_[other].waits_for < 0;
    const bool wanted =
        slot.waits_for < 0 ? !is_here : other == static_cast<size_t>(slot.waits_for);
    if (!wanted) continue;
    absent.push_back({ranks_[other],
                      group_.left_[static_cast<size_t>(ranks_[other])]
                          ? AbsentRank::State::has_ended
                          : AbsentRank::State::is_missing,
                      site_of(slots_[other].call)});
  }
  return missing_message(ranks_[place], {}, site_of(slot.call), group_.limit(), absent);
}

std::string ThreadGroup::Room::message_of_leaver(int rank) const {
  const size_t leaver = place_of(rank);
  if (leaver == ranks_.size()) return {};
  for (size_t place = 0; place < slots_.size(); ++place) {
    const Slot& slot = slots_[place];
    if (!slot.waits || (slot.waits_for >= 0 && slot.done())) continue;
    if (slot.waits_for < 0 || slot.waits_for == static_cast<int>(leaver)) {
      return missing(place);
    }
  }
  return {};
}

void ThreadGroup::Room::fail(const std::string& message) {
  group_.fail_locked(std::make_exception_ptr(UserError(ExitStatus::failed, message)));
  std::rethrow_exception(group_.failure_);
}

ThreadGroup::ThreadGroup(int size, std::chrono::milliseconds limit)
    : ProcessGroup(limit, ranks_below(size), std::vector<int32_t>(static_cast<size_t>(size), 0)),
      left_(static_cast<size_t>(size)) {}

ThreadGroup::~ThreadGroup() = default;

ThreadGroup::Room& ThreadGroup::room_of(const std::vector<int32_t>& members) {
  std::unique_ptr<Room>& room = rooms_[members];
  if (!room) room = std::make_unique<Room>(*this, members);
  return *room;
}

Communicator& ThreadGroup::member(int rank, const std::vector<int32_t>& members) {
  TROUPE_CHECK(std::is_sorted(members.begin(), members.end()) &&
                   std::binary_search(members.begin(), members.end(), rank) &&
                   members.front() >= 0 && members.back() < size(),
               "the members of a communicator");
  const std::lock_guard lock(mutex_);
  return room_of(members).member(rank);
}

ThreadGroup::Room& ThreadGroup::room_of_all() {
  const std::lock_guard lock(mutex_);
  return room_of(ranks_below(size()));
}

std::vector<uint64_t> ThreadGroup::exchange(int rank, uint64_t value) {
  return room_of_all().exchange(static_cast<size_t>(rank), value);
}

std::vector<std::string> ThreadGroup::gather(int rank, std::string bytes) {
  return room_of_all().gather(static_cast<size_t>(rank), std::move(bytes));
}

void ThreadGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  left_[static_cast<size_t>(rank)] = true;
  if (failure_) return;
  for (const auto& [members, room] : rooms_) {
    const std::string message = room->message_of_leaver(rank);
    if (message.empty()) continue;
    fail_locked(std::make_exception_ptr(UserError(ExitStatus::failed, message)));
    return;
  }
}

void ThreadGroup::fail_locked(std::exception_ptr cause) {
  if (!failure_) failure_ = std::move(cause);
  for (const auto& [members, room] : rooms_) room->wake();
}

void ThreadGroup::fail(std::exception_ptr cause) {
  const std::lock_guard lock(mutex_);
  fail_locked(std::move(cause));
}

std::exception_ptr ThreadGroup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

namespace {

// Which ranks still run, for those that wait for their end.
class RunningRanks {
 public:
  explicit RunningRanks(int count) : running_(count) {}

  void ended(bool failed) {
    const std::lock_guard lock(mutex_);
    --running_;
    failed_ = failed_ || failed;
    changed_.notify_all();
  }

  // Waits for the end of all, after the first failure no longer than `grace`. False: some run on.
  bool wait(std::chrono::milliseconds grace) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0 || failed_; });
    return changed_.wait_for(lock, grace, [&] { return running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_;
  bool failed_ = false;
};

[[noreturn]] void exit_with(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "troupe: %s A rank cannot be stopped; the process exits.\n", error.what());
  }
  std::fflush(nullptr);
  std::_Exit(static_cast<int>(ExitStatus::failed));
}

}  // namespace

void ThreadGroup::run(const std::function<void(int)>& body) {
  left_.assign(left_.size(), false);  // no rank is at work
  RunningRanks running(size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([&, rank] {
      bool failed = false;
      try {
        body(rank);
      } catch (...) {
        failed = true;
        fail(std::current_exception());
      }
      leave(rank);
      running.ended(failed);
    });
  }
  if (!running.wait(2 * limit())) exit_with(failure());
  for (std::thread& thread : threads) thread.join();
  if (const std::exception_ptr cause = failure()) std::rethrow_exception(cause);
}

}  // namespace troupe
