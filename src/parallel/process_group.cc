#include "parallel/process_group.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fmt/format.h>
#include <thread>
#include <utility>

#include "program/op_spec.h"
#include "program/shard.h"

namespace troupe {
namespace {

// Elements that are summed over all ranks before the next: the sums stay in the first-level cache.
constexpr int64_t kSumBlock = 1024;
constexpr int64_t kSumGrain = 32 * kSumBlock;
constexpr int64_t kCopyGrain = int64_t{1} << 18;  // bytes

std::string describe(const TensorView& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype), tensor.shape.to_string());
}

// "operation 12 (all_reduce), layer 1, micro-batch 0"
std::string describe(const CollectiveCall& call) {
  if (call.op == nullptr) return "no operation";
  std::string text = fmt::format("operation {} ({})", call.index, call.op->spec->name);
  const Place& place = call.op->place;
  if (place.layer >= 0) text += fmt::format(", layer {}", place.layer);
  if (place.micro_batch >= 0) text += fmt::format(", micro-batch {}", place.micro_batch);
  return text;
}

std::string describe(const CollectiveCall& call, std::span<const TensorView> tensors) {
  std::string text = describe(call);
  if (!tensors.empty()) text += " of ";
  for (size_t i = 0; i < tensors.size(); ++i) {
    text += (i == 0 ? "" : ", ") + describe(tensors[i]);
  }
  return text;
}

bool same_type(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

// This rank's share of the elements: whole blocks of cache lines, so that no two ranks write one.
struct Share {
  int64_t begin = 0;
  int64_t end = 0;
  Share(int64_t elements, int rank, int ranks) {
    constexpr int64_t kLine = 16;
    const int64_t lines = (elements + kLine - 1) / kLine;
    begin = std::min(elements, lines * rank / ranks * kLine);
    end = std::min(elements, lines * (rank + 1) / ranks * kLine);
  }
};

// The sum over sources 0, 1, ... of their element i, for i of `share`, in Sum's arithmetic; it goes
// to every result, which may be a source. `source(k)` and `result(k)` are where they lie.
template <class T, class Sum, class Source, class Result>
void sum_share(size_t sources, const Source& source, size_t results, const Result& result,
               Share share, ThreadPool& pool) {
  pool.parallel_ranges(share.end - share.begin, kSumGrain, [&](int64_t first, int64_t last, int) {
    std::array<Sum, kSumBlock> sum;
    for (int64_t at = share.begin + first; at < share.begin + last; at += kSumBlock) {
      const int64_t count = std::min(kSumBlock, share.begin + last - at);
      for (size_t k = 0; k < sources; ++k) {
        const T* terms = source(k) + at;
        for (int64_t i = 0; i < count; ++i) {
          const auto term = static_cast<Sum>(terms[i]);
          Sum& element = sum[static_cast<size_t>(i)];
          element = k == 0 ? term : element + term;
        }
      }
      for (size_t k = 0; k < results; ++k) {
        T* target = result(k) + at;
        for (int64_t i = 0; i < count; ++i) {
          target[i] = static_cast<T>(sum[static_cast<size_t>(i)]);
        }
      }
    }
  });
}

// What one rank shows the others of its group during a call.
struct Shown {
  std::span<const TensorView> tensors;
  std::span<const Block> sent;  // or its windows
};

}  // namespace

// The ranks that have one communicator in common, and where they meet. Guarded by the group's
// mutex, except for what is shown while all are between begin and end.
class ProcessGroup::Room {
 public:
  Room(ProcessGroup& group, std::vector<int32_t> ranks);

  Communicator& member(int rank);
  size_t place_of(int rank) const {
    return static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
  }

  // What a meeting is for.
  enum class Meeting : uint8_t {
    begin_collective,  // limited; all must call the same
    end_collective,    // all are there and only compute: never limited
    exchange,          // without limit
  };
  void begin(size_t place, const CollectiveCall& call, Shown shown);
  void end(size_t place);
  std::vector<uint64_t> exchange(size_t place, uint64_t value);

  void send(size_t from, size_t to, const CollectiveCall& call, const TensorView& tensor);
  void finish_send(size_t from, size_t to, const CollectiveCall& call);
  void receive(size_t from, size_t to, const CollectiveCall& call, const TensorView& tensor);

  void wake() { changed_.notify_all(); }
  // What to say when `rank` has left while others wait for it; empty: nobody does.
  std::string message_of_leaver(int rank) const;

  const Shown& shown(size_t place) const { return slots_[place].shown; }

 private:
  class Member;
  // What a rank has in hand.
  struct Slot {
    Meeting meeting = Meeting::exchange;  // the last one
    CollectiveCall call;                  // op is null outside of a program
    Shown shown;
    uint64_t value = 0;  // of exchange()
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
  // Waits until all ranks are here, or throws.
  void meet(std::unique_lock<std::mutex>& lock, size_t place, Meeting meeting);
  // Waits within the limit for one other rank, until `done`, or throws.
  template <class Done>
  void wait_for(std::unique_lock<std::mutex>& lock, size_t place, size_t other,
                const CollectiveCall& call, const Done& done);
  // Empty when all ranks meet for the same and call the same. While they are all waiting: their
  // tensors are looked at.
  std::string mismatch_message() const;
  std::string missing_message(size_t place) const;
  [[noreturn]] void fail(const std::string& message);

  ProcessGroup& group_;
  const std::vector<int32_t> ranks_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;  // by place
  std::vector<Mailbox> mailboxes_;
  size_t arrived_ = 0;
  uint64_t round_ = 0;  // meetings that were complete
  std::vector<std::unique_ptr<Member>> members_;
};

class ProcessGroup::Room::Member : public Communicator {
 public:
  Member(Room& room, size_t place, size_t size) : room_(room), place_(place), size_(size) {}

  int rank() const override { return static_cast<int>(place_); }
  int size() const override { return static_cast<int>(size_); }

  void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                  ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t i = 0; i < tensors.size(); ++i) sum_tensor(tensors[i], i, i, pool);
    room_.end(place_);
  }

  // A rank writes its own shards only, and nobody else reads them.
  void reduce_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t i = 0; i < tensors.size(); ++i) {
      switch (tensors[i].dtype) {
        case DType::f64:
          sum_shard<double>(i, pool);
          break;
        case DType::f32:
          sum_shard<float>(i, pool);
          break;
        default:
          sum_shard<int32_t>(i, pool);
          break;
      }
    }
    room_.end(place_);
  }

  // A rank writes what is not its own, and the others read its own.
  void gather_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     ThreadPool& pool) override {
    room_.begin(place_, call, {.tensors = tensors, .sent = {}});
    for (size_t place = 0; place < size_; ++place) {
      if (place == place_) continue;
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto size = static_cast<int64_t>(size_of(tensors[i].dtype));
        const IndexRange shard = shard_of(tensors[i].shape, shard_at(place));
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
    switch (own.dtype) {
      case DType::f64:
        scatter_sum<double>(result, pool);
        break;
      case DType::f32:
        scatter_sum<float>(result, pool);
        break;
      case DType::bf16:
        scatter_sum<bf16, float>(result, pool);
        break;
      default:
        scatter_sum<int32_t>(result, pool);
        break;
    }
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
  const Block& window(int member, size_t which) const override {
    return room_.shown(static_cast<size_t>(member)).sent[which];
  }
  void close() override { room_.end(place_); }

  void prefix_sum(const CollectiveCall& call, const TensorView& own, const TensorView& running,
                  const TensorView& total) override {
    room_.begin(place_, call, {.tensors = {&own, 1}, .sent = {}});
    const auto elements = static_cast<size_t>(own.shape.elements());
    std::fill_n(total.as<int32_t>(), elements, 0);
    for (size_t place = 0; place < size_; ++place) {
      const auto* counts = room_.shown(place).tensors[0].as<int32_t>();
      for (size_t i = 0; i < elements; ++i) total.as<int32_t>()[i] += counts[i];
      if (place == place_) std::copy_n(total.as<int32_t>(), elements, running.as<int32_t>());
    }
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
    const Share share(tensor.shape.elements(), rank(), size());
    switch (tensor.dtype) {
      case DType::f64:
        sum_shares<double>(source, result, share, pool);
        break;
      case DType::f32:
        sum_shares<float>(source, result, share, pool);
        break;
      case DType::bf16:
        sum_shares<bf16, float>(source, result, share, pool);
        break;
      default:
        sum_shares<int32_t>(source, result, share, pool);
        break;
    }
  }

  template <class T, class Sum = T>
  void sum_shares(size_t source, size_t result, Share share, ThreadPool& pool) {
    const auto tensor = [&](size_t which) {
      return [this, which](size_t place) { return room_.shown(place).tensors[which].as<T>(); };
    };
    sum_share<T, Sum>(size_, tensor(source), size_, tensor(result), share, pool);
  }

  Shard shard_at(size_t place) const {
    return {.place = static_cast<int32_t>(place), .count = static_cast<int32_t>(size_)};
  }

  // Of tensor `which` of all ranks, into this rank's.
  template <class T>
  void sum_shard(size_t which, ThreadPool& pool) {
    const TensorView& own = room_.shown(place_).tensors[which];
    const IndexRange shard = shard_of(own.shape, shard_at(place_));
    const auto source = [&](size_t place) {
      return room_.shown(place).tensors[which].as<T>() + shard.begin;
    };
    sum_share<T, T>(
        size_, source, 1, [&](size_t) { return own.as<T>() + shard.begin; },
        Share(shard.end - shard.begin, 0, 1), pool);
  }

  template <class T, class Sum = T>
  void scatter_sum(const TensorView& result, ThreadPool& pool) {
    const int64_t elements = result.shape.elements();
    const auto source = [&](size_t place) {
      return room_.shown(place).tensors[0].as<T>() + static_cast<int64_t>(place_) * elements;
    };
    sum_share<T, Sum>(
        size_, source, 1, [&](size_t) { return result.as<T>(); }, Share(elements, 0, 1), pool);
  }

  Room& room_;
  const size_t place_;
  const size_t size_;
};

ProcessGroup::Room::Room(ProcessGroup& group, std::vector<int32_t> ranks)
    : group_(group),
      ranks_(std::move(ranks)),
      slots_(ranks_.size()),
      mailboxes_(ranks_.size() * ranks_.size()) {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    members_.push_back(std::make_unique<Member>(*this, place, ranks_.size()));
  }
}

Communicator& ProcessGroup::Room::member(int rank) {
  return *members_[place_of(rank)];
}

void ProcessGroup::Room::meet(std::unique_lock<std::mutex>& lock, size_t place, Meeting meeting) {
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  Slot& slot = slots_[place];
  slot.waits = true;
  slot.waits_for = -1;
  slot.meeting = meeting;
  if (++arrived_ == ranks_.size()) {
    const std::string mismatch = mismatch_message();
    if (!mismatch.empty()) fail(mismatch);
    arrived_ = 0;
    ++round_;
    for (Slot& each : slots_) each.waits = false;
    changed_.notify_all();
    return;
  }
  for (const int32_t rank : ranks_) {
    if (group_.left_[static_cast<size_t>(rank)]) fail(missing_message(place));
  }
  const uint64_t round = round_;
  const auto over = [&] { return round_ != round || group_.failure_ != nullptr; };
  if (meeting != Meeting::begin_collective) {
    changed_.wait(lock, over);
  } else if (!changed_.wait_for(lock, group_.limit_, over)) {
    fail(missing_message(place));
  }
  if (round_ == round) std::rethrow_exception(group_.failure_);
}

std::vector<uint64_t> ProcessGroup::Room::exchange(size_t place, uint64_t value) {
  std::unique_lock lock(group_.mutex_);
  Slot& slot = slots_[place];
  slot.call = {};
  slot.shown = {};
  slot.value = value;
  meet(lock, place, Meeting::exchange);
  std::vector<uint64_t> values;
  for (const Slot& each : slots_) values.push_back(each.value);
  // Nobody may write the next number before all have read these.
  meet(lock, place, Meeting::exchange);
  return values;
}

void ProcessGroup::Room::begin(size_t place, const CollectiveCall& call, Shown shown) {
  std::unique_lock lock(group_.mutex_);
  Slot& slot = slots_[place];
  slot.call = call;
  slot.shown = shown;
  meet(lock, place, Meeting::begin_collective);
}

void ProcessGroup::Room::end(size_t place) {
  std::unique_lock lock(group_.mutex_);
  meet(lock, place, Meeting::end_collective);
}

template <class Done>
void ProcessGroup::Room::wait_for(std::unique_lock<std::mutex>& lock, size_t place, size_t other,
                                  const CollectiveCall& call, const Done& done) {
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  if (done()) return;
  Slot& slot = slots_[place];
  slot.call = call;
  slot.waits = true;
  slot.waits_for = static_cast<int>(other);
  slot.done = done;
  if (group_.left_[static_cast<size_t>(ranks_[other])]) fail(missing_message(place));
  const auto over = [&] { return done() || group_.failure_ != nullptr; };
  const bool in_time = changed_.wait_for(lock, group_.limit_, over);
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  if (!in_time) fail(missing_message(place));
  slot.waits = false;
}

void ProcessGroup::Room::send(size_t from, size_t to, const CollectiveCall& call,
                              const TensorView& tensor) {
  const std::lock_guard lock(group_.mutex_);
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  mailbox(from, to).sent.push_back({call, tensor});
  changed_.notify_all();
}

void ProcessGroup::Room::finish_send(size_t from, size_t to, const CollectiveCall& call) {
  std::unique_lock lock(group_.mutex_);
  Mailbox& box = mailbox(from, to);
  const uint64_t number = ++box.finished;
  wait_for(lock, from, to, call, [&] { return box.received >= number; });
}

void ProcessGroup::Room::receive(size_t from, size_t to, const CollectiveCall& call,
                                 const TensorView& tensor) {
  std::unique_lock lock(group_.mutex_);
  Mailbox& box = mailbox(from, to);
  wait_for(lock, to, from, call, [&] { return !box.sent.empty(); });
  const Message message = box.sent.front();
  if (!same_type(message.tensor, tensor)) {
    fail(fmt::format("Rank {} sends {} in {}, but rank {} receives {} in {}. All ranks end.",
                     ranks_[from], describe(message.tensor), describe(message.call), ranks_[to],
                     describe(tensor), describe(call)));
  }
  // The sender leaves its tensor alone until it knows that this is done.
  lock.unlock();
  std::memcpy(tensor.data, message.tensor.data,
              static_cast<size_t>(tensor.shape.elements()) * size_of(tensor.dtype));
  lock.lock();
  box.sent.pop_front();
  ++box.received;
  changed_.notify_all();
}

std::string ProcessGroup::Room::mismatch_message() const {
  const Slot& first = slots_.front();
  for (size_t place = 1; place < slots_.size(); ++place) {
    const Slot& other = slots_[place];
    const auto spec_of = [](const Slot& slot) {
      return slot.call.op == nullptr ? nullptr : slot.call.op->spec;
    };
    if (first.meeting == other.meeting && spec_of(first) == spec_of(other) &&
        std::equal(first.shown.tensors.begin(), first.shown.tensors.end(),
                   other.shown.tensors.begin(), other.shown.tensors.end(), same_type)) {
      continue;
    }
    return fmt::format(
        "The ranks do not run the same collective: rank {} is in {}, rank {} in {}. All ranks end.",
        ranks_.front(), describe(first.call, first.shown.tensors), ranks_[place],
        describe(other.call, other.shown.tensors));
  }
  return {};
}

std::string ProcessGroup::Room::missing_message(size_t place) const {
  const Slot& slot = slots_[place];
  std::string missing;
  for (size_t other = 0; other < slots_.size(); ++other) {
    const bool is_here = slots_[other].waits && slots_[other].waits_for < 0;
    const bool wanted =
        slot.waits_for < 0 ? !is_here : other == static_cast<size_t>(slot.waits_for);
    if (!wanted) continue;
    missing +=
        fmt::format("{}rank {} ({}, last seen in {})", missing.empty() ? "" : ", ", ranks_[other],
                    group_.left_[static_cast<size_t>(ranks_[other])] ? "has ended" : "is missing",
                    describe(slots_[other].call));
  }
  return fmt::format("Rank {} waited in vain ({} s at most) in {} for: {}. All ranks end.",
                     ranks_[place], std::chrono::duration<double>(group_.limit_).count(),
                     describe(slot.call), missing);
}

std::string ProcessGroup::Room::message_of_leaver(int rank) const {
  const size_t leaver = place_of(rank);
  if (leaver == ranks_.size()) return {};
  for (size_t place = 0; place < slots_.size(); ++place) {
    const Slot& slot = slots_[place];
    if (!slot.waits || (slot.waits_for >= 0 && slot.done())) continue;
    if (slot.waits_for < 0 || slot.waits_for == static_cast<int>(leaver)) {
      return missing_message(place);
    }
  }
  return {};
}

void ProcessGroup::Room::fail(const std::string& message) {
  group_.fail_locked(std::make_exception_ptr(UserError(ExitStatus::failed, message)));
  std::rethrow_exception(group_.failure_);
}

ProcessGroup::ProcessGroup(int size, std::chrono::milliseconds limit)
    : size_(size), limit_(limit), left_(static_cast<size_t>(size)) {
  TROUPE_CHECK(size >= 1, "a group has a member");
}

ProcessGroup::~ProcessGroup() = default;

ProcessGroup::Room& ProcessGroup::room_of(const std::vector<int32_t>& members) {
  std::unique_ptr<Room>& room = rooms_[members];
  if (!room) room = std::make_unique<Room>(*this, members);
  return *room;
}

Communicator& ProcessGroup::member(int rank, const std::vector<int32_t>& members) {
  TROUPE_CHECK(std::is_sorted(members.begin(), members.end()) &&
                   std::binary_search(members.begin(), members.end(), rank) &&
                   members.front() >= 0 && members.back() < size_,
               "the members of a communicator");
  const std::lock_guard lock(mutex_);
  return room_of(members).member(rank);
}

namespace {

std::vector<int32_t> ranks_below(int size) {
  std::vector<int32_t> ranks(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) ranks[static_cast<size_t>(rank)] = rank;
  return ranks;
}

}  // namespace

Communicator& ProcessGroup::member(int rank) {
  return member(rank, ranks_below(size_));
}

std::vector<uint64_t> ProcessGroup::exchange(int rank, uint64_t value) {
  Room* room = nullptr;
  {
    const std::lock_guard lock(mutex_);
    room = &room_of(ranks_below(size_));
  }
  return room->exchange(static_cast<size_t>(rank), value);
}

void ProcessGroup::leave(int rank) {
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

void ProcessGroup::rejoin() {
  const std::lock_guard lock(mutex_);
  left_.assign(left_.size(), false);
}

void ProcessGroup::fail_locked(std::exception_ptr cause) {
  if (!failure_) failure_ = std::move(cause);
  for (const auto& [members, room] : rooms_) room->wake();
}

void ProcessGroup::fail(std::exception_ptr cause) {
  const std::lock_guard lock(mutex_);
  fail_locked(std::move(cause));
}

std::exception_ptr ProcessGroup::failure() const {
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

void run_ranks(ProcessGroup& group, const std::function<void(int)>& body) {
  group.rejoin();
  RunningRanks running(group.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      bool failed = false;
      try {
        body(rank);
      } catch (...) {
        failed = true;
        group.fail(std::current_exception());
      }
      group.leave(rank);
      running.ended(failed);
    });
  }
  if (!running.wait(2 * group.limit())) exit_with(group.failure());
  for (std::thread& thread : threads) thread.join();
  if (const std::exception_ptr cause = group.failure()) std::rethrow_exception(cause);
}

}  // namespace troupe
