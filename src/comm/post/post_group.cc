#include "comm/post/post_group.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fmt/format.h>
#include <limits>
#include <thread>
#include <unistd.h>
#include <utility>

#include "comm/bytes.h"
#include "comm/ordered_sum.h"
#include "program/shard.h"

namespace troupe {
namespace {

using Kind = Announcement::Kind;

// The number of the end of everything, after all runs.
constexpr uint64_t kEnd = std::numeric_limits<uint64_t>::max();
// What a call may take for terms of others.
constexpr int64_t kStagedBytes = int64_t{16} << 20;
constexpr int64_t kSmallestRound = int64_t{64} << 10;
constexpr int64_t kGatheredPiece = int64_t{16} << 20;  // bytes
constexpr size_t kLongestText = size_t{64} << 10;
constexpr int64_t kBlockCopyGrain = int64_t{1} << 18;  // bytes
// How long a rank that has failed waits for rank 0 to say so and end all.
constexpr std::chrono::milliseconds kSpeakerLimit{1000};
// How long it then lets the rank that has spoken end all. Who ends all before loses that message
// where the launcher drops what it has not read.
constexpr std::chrono::milliseconds kEndLimit{10000};

// FNV-1a. Rooms of one group with equal hashes would be taken for one; there are a few dozen.
uint64_t hash_of(const std::vector<int32_t>& members) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int32_t member : members) {
    for (int shift = 0; shift < 32; shift += 8) {
      hash = (hash ^ (static_cast<uint32_t>(member) >> shift & 0xff)) * 0x100000001b3;
    }
  }
  return hash;
}

std::string to_bytes(const Announcement& announcement) {
  std::string bytes;
  append_bytes(bytes, announcement.kind);
  append_bytes(bytes, announcement.room);
  append_bytes(bytes, announcement.number);
  append_bytes(bytes, announcement.channel);
  append_bytes(bytes, announcement.index);
  append_bytes(bytes, announcement.layer);
  append_bytes(bytes, announcement.micro_batch);
  append_bytes(bytes, std::string_view(announcement.text).substr(0, kLongestText));
  append_bytes(bytes, announcement.tensors.size());
  for (const TensorView& tensor : announcement.tensors) {
    append_bytes(bytes, tensor.dtype);
    append_bytes(bytes, tensor.shape);
  }
  append_bytes(bytes, announcement.waits_for.size());
  for (const int32_t rank : announcement.waits_for) append_bytes(bytes, rank);
  return bytes;
}

// As much as another rank may make this one print; lines stay lines.
std::string shown_text(std::string_view text) {
  std::string result(text.substr(0, kLongestText));
  for (char& c : result) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n') || byte == 0x7f) c = '?';
  }
  return result;
}

// What rank `from` has sent. A UserError where it is no announcement.
Announcement from_bytes(std::string_view bytes, int32_t from, int32_t ranks) {
  const auto require = [&](bool fits) {
    if (fits) return;
    throw_failed(fmt::format(
        "What rank {} sends is no announcement of this build of Troupe. All ranks end.", from));
  };
  ByteReader reader(bytes);
  Announcement announcement;
  announcement.kind = reader.take<Kind>();
  require(announcement.kind <= Kind::answers);
  announcement.room = reader.take<uint64_t>();
  announcement.number = reader.take<uint64_t>();
  announcement.channel = reader.take<int32_t>();
  require(announcement.channel >= 0 && announcement.channel < Post::kChannels);
  announcement.index = reader.take<int32_t>();
  announcement.layer = reader.take<int32_t>();
  announcement.micro_batch = reader.take<int32_t>();
  announcement.text = shown_text(reader.take_text());
  announcement.tensors.resize(reader.take_count(sizeof(DType) + sizeof(Shape)));
  for (TensorView& tensor : announcement.tensors) {
    tensor.dtype = reader.take_dtype();
    tensor.shape = reader.take_shape();
  }
  require(announcement.kind != Kind::message || announcement.tensors.size() == 1);
  require(announcement.kind != Kind::failed ||
          (announcement.index >= 0 && announcement.index < ranks));
  announcement.waits_for = reader.take_values<int32_t>();
  for (const int32_t rank : announcement.waits_for) require(rank >= 0 && rank < ranks);
  require(reader.at_end());
  return announcement;
}

ExitStatus status_of(uint64_t number) {
  const auto status = static_cast<ExitStatus>(number);
  const bool is_known = status == ExitStatus::bad_request || status == ExitStatus::does_not_fit ||
                        status == ExitStatus::interrupted;
  return is_known && number <= 0xff ? status : ExitStatus::failed;
}

// Elements of a tensor, one after the other.
struct Stretch {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t elements = 0;
};
using Stretches = std::vector<Stretch>;

Stretch stretch_of(const TensorView& tensor, IndexRange range) {
  return {static_cast<std::byte*>(tensor.data) +
              range.begin * static_cast<int64_t>(size_of(tensor.dtype)),
          tensor.dtype, range.end - range.begin};
}

Stretch stretch_of(const TensorView& tensor) {
  return stretch_of(tensor, {0, tensor.shape.elements()});
}

std::vector<Block> blocks_of(const Stretches& stretches) {
  std::vector<Block> blocks;
  for (const Stretch& stretch : stretches) {
    blocks.push_back(
        {stretch.data, stretch.elements * static_cast<int64_t>(size_of(stretch.dtype))});
  }
  return blocks;
}

int64_t bytes_of(const Stretches& stretches) {
  int64_t bytes = 0;
  for (const Block& block : blocks_of(stretches)) bytes += block.bytes;
  return bytes;
}

// In pieces of about `bytes`, whatever they are of; none is larger than the first.
std::vector<Stretches> cut(const Stretches& stretches, int64_t bytes) {
  std::vector<Stretches> rounds;
  int64_t room = 0;
  for (const Stretch& stretch : stretches) {
    const auto size = static_cast<int64_t>(size_of(stretch.dtype));
    for (int64_t at = 0; at < stretch.elements;) {
      if (room < size) {
        rounds.emplace_back();
        room = bytes;
      }
      const int64_t elements = std::min(stretch.elements - at, room / size);
      rounds.back().push_back({stretch.data + at * size, stretch.dtype, elements});
      at += elements;
      room -= elements * size;
    }
  }
  return rounds;
}

// Goes easy on the processor, which the ranks that are waited for may need.
void pause(int polls) {
  constexpr int kBusyPolls = 200;
  if (polls < kBusyPolls) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(polls < 5 * kBusyPolls ? 20 : 100));
  }
}

}  // namespace

// This rank among the ranks of one room.
class PostGroup::Member : public Communicator {
 public:
  Member(PostGroup& group, std::vector<int32_t> ranks)
      : group_(group),
        ranks_(std::move(ranks)),
        place_(static_cast<size_t>(std::find(ranks_.begin(), ranks_.end(), group.rank_) -
                                   ranks_.begin())),
        room_(hash_of(ranks_)),
        sent_(ranks_.size()),
        put_(ranks_.size()) {}

  int rank() const override { return static_cast<int>(place_); }
  int size() const override { return static_cast<int>(ranks_.size()); }
  int32_t rank_at(int place) const override { return ranks_[static_cast<size_t>(place)]; }
  std::chrono::milliseconds limit() const override { return group_.limit(); }

  void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                  ThreadPool& pool) override;
  void reduce_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     std::span<const int16_t> owners, ThreadPool& pool) override;
  void gather_shards(const CollectiveCall& call, std::span<const TensorView> tensors,
                     std::span<const int16_t> owners, ThreadPool& pool) override;
  void sum(const CollectiveCall& call, const TensorView& own, const TensorView& result,
           ThreadPool& pool) override;
  void reduce_scatter(const CollectiveCall& call, const TensorView& own, const TensorView& result,
                      ThreadPool& pool) override;
  void all_gather(const CollectiveCall& call, const TensorView& own, const TensorView& gathered,
                  ThreadPool& pool) override;
  void all_to_all(const CollectiveCall& call, std::span<const Block> sent,
                  std::span<const Block> received, ThreadPool& pool) override;
  void open(const CollectiveCall& call, std::span<const Block> windows) override;
  void put(int member, size_t window, int64_t offset, Block bytes) override;
  void close() override;
  void prefix_sum(const CollectiveCall& call, const TensorView& own, const TensorView& running,
                  const TensorView& total) override;
  void send(const CollectiveCall& call, const TensorView& tensor, int to) override;
  void finish_send(const CollectiveCall& call, int to) override;
  void receive(const CollectiveCall& call, const TensorView& tensor, int from) override;

  // Announces this rank's call, with one channel for all that it will send in it.
  Announcement announce(Kind kind, uint64_t number, const CollectiveCall& call,
                        std::span<const TensorView> tensors);
  // Waits until all have announced theirs, and takes them, by place; `own` is this rank's. Throws
  // if they do not fit together.
  std::vector<Announcement> gather_calls(std::unique_lock<std::mutex>& lock, Announcement own);

 private:
  friend class Call;
  struct Put {
    size_t window = 0;
    int64_t offset = 0;
    Block bytes;
  };

  Announcement describe(Kind kind, const CollectiveCall& call,
                        std::span<const TensorView> tensors) const;
  // Sums what terms(r) is for this rank's place r, over the ranks, into `results`, as all others do
  // with theirs.
  template <class Terms>
  void sum_share(Call& call, const Terms& terms, const Stretches& results, ThreadPool& pool);
  // The same, and the results of all ranks are handed to all: they lie in results(r).
  template <class Terms, class Results>
  void sum_for_all(const CollectiveCall& call, std::span<const TensorView> tensors,
                   const Terms& terms, const Results& results, ThreadPool& pool);
  // Of every rank, block r of `sent` goes to place r, and block r of `received` comes from there.
  void exchange_blocks(const CollectiveCall& collective, std::span<const TensorView> tensors,
                       std::span<const Block> sent, std::span<const Block> received,
                       ThreadPool& pool);
  // Of every tensor the shard of a place.
  Stretches shards_at(std::span<const TensorView> tensors, std::span<const int16_t> owners,
                      size_t place) const;

  PostGroup& group_;
  const std::vector<int32_t> ranks_;
  const size_t place_;
  const uint64_t room_;
  std::vector<std::deque<Post::Transfer>> sent_;  // by place: not finished
  // While windows are open.
  std::unique_ptr<Call> open_call_;
  std::span<const Block> windows_;
  std::mutex put_mutex_;
  std::vector<std::vector<Put>> put_;  // by place
};

// One collective of one member, from its announcement to the end of all its transfers.
class PostGroup::Call {
 public:
  // Where a call is cut short, its transfers are not, and their memory stays.
  ~Call() {
    if (!sends_.empty() || !receives_.empty()) group_.abandoned_.push_back(std::move(memory_));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Call(Member& member, const CollectiveCall& call, std::span<const TensorView> tensors)
      : member_(member), group_(member.group_), site_(site_of(call)) {
    const std::lock_guard lock(group_.mutex_);
    own_ = member.announce(Kind::collective, 0, call, tensors);
    channel_ = own_.channel;
  }

  // Sends at once, receives after gather_calls(). Nothing is sent for no bytes.
  void send(size_t place, std::span<const Block> blocks) {
    if (is_empty(blocks)) return;
    const std::lock_guard lock(group_.mutex_);
    const int32_t to = member_.ranks_[place];
    sends_.push_back({to, group_.post_.send(to, channel_, blocks)});
  }

  void gather_calls() {
    std::unique_lock lock(group_.mutex_);
    others_ = member_.gather_calls(lock, std::move(own_));
  }

  void receive(size_t place, std::span<const Block> blocks) {
    if (is_empty(blocks)) return;
    const std::lock_guard lock(group_.mutex_);
    const int32_t from = member_.ranks_[place];
    receives_.push_back({from, group_.post_.receive(from, others_[place].channel, blocks)});
  }

  void wait_for_received() { wait_for(receives_); }
  void wait_for_sent() { wait_for(sends_); }

  // Memory for what is sent or received, as long as the call; zeros.
  Block allocate(int64_t bytes) {
    std::vector<std::byte>& memory = memory_.emplace_back(static_cast<size_t>(bytes));
    return {memory.data(), bytes};
  }

 private:
  using Transfers = std::vector<std::pair<int32_t, Post::Transfer>>;

  static bool is_empty(std::span<const Block> blocks) {
    return std::all_of(blocks.begin(), blocks.end(),
                       [](const Block& block) { return block.bytes == 0; });
  }

  void wait_for(Transfers& transfers) {
    std::unique_lock lock(group_.mutex_);
    for (const auto& [other, transfer] : transfers) {
      group_.wait_for(lock, site_, other, transfer);
    }
    transfers.clear();
  }

  Member& member_;
  PostGroup& group_;
  const CallSite site_;
  Announcement own_;
  int channel_ = 0;
  std::vector<Announcement> others_;  // by place
  Transfers sends_;
  Transfers receives_;
  std::deque<std::vector<std::byte>> memory_;
};

Announcement PostGroup::Member::describe(Kind kind, const CollectiveCall& call,
                                         std::span<const TensorView> tensors) const {
  const CallSite site = site_of(call);
  Announcement announcement{.kind = kind,
                            .room = room_,
                            .channel = group_.next_channel(),
                            .index = site.index,
                            .layer = site.layer,
                            .micro_batch = site.micro_batch,
                            .text = std::string(site.operation),
                            .tensors = {}};
  for (const TensorView& tensor : tensors) {
    announcement.tensors.push_back({.data = nullptr, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  return announcement;
}

Announcement PostGroup::Member::announce(Kind kind, uint64_t number, const CollectiveCall& call,
                                         std::span<const TensorView> tensors) {
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  Announcement own = describe(kind, call, tensors);
  own.number = number;
  const std::string bytes = to_bytes(own);
  for (const int32_t rank : ranks_) {
    if (rank != group_.rank_) group_.post_.send_message(rank, bytes);
  }
  return own;
}

std::vector<Announcement> PostGroup::Member::gather_calls(std::unique_lock<std::mutex>& lock,
                                                          Announcement own) {
  Mail& mail = group_.mail_[room_];
  const auto absent = [&] {
    std::vector<int32_t> ranks;
    for (const int32_t rank : ranks_) {
      if (rank != group_.rank_ && mail.calls[rank].empty()) ranks.push_back(rank);
    }
    return ranks;
  };
  group_.wait(lock, {own.site(), own.kind == Kind::collective, absent},
              [&] { return absent().empty(); });
  std::vector<Announcement> all(ranks_.size());
  all[place_] = std::move(own);
  for (size_t place = 0; place < all.size(); ++place) {
    if (place == place_) continue;
    std::deque<Announcement>& calls = mail.calls[ranks_[place]];
    all[place] = std::move(calls.front());
    calls.pop_front();
  }
  const auto call_of = [&](size_t place) {
    return RankCall{ranks_[place], all[place].site(), all[place].tensors,
                    group_.process_of(ranks_[place])};
  };
  for (size_t place = 1; place < all.size(); ++place) {
    if (all[0].kind == all[place].kind && same_call(call_of(0), call_of(place))) continue;
    throw_failed(mismatch_message(call_of(0), call_of(place)));
  }
  return all;
}

template <class Terms>
void PostGroup::Member::sum_share(Call& call, const Terms& terms, const Stretches& results,
                                  ThreadPool& pool) {
  const auto others = static_cast<int64_t>(ranks_.size()) - 1;
  const int64_t round_bytes =
      others == 0 ? kStagedBytes : std::max(kSmallestRound, kStagedBytes / others);
  std::vector<std::vector<Stretches>> rounds;  // by place
  for (size_t place = 0; place < ranks_.size(); ++place) {
    rounds.push_back(cut(terms(place), round_bytes));
    if (place == place_) continue;
    for (const Stretches& round : rounds.back()) call.send(place, blocks_of(round));
  }
  call.gather_calls();
  const std::vector<Stretches> own_results = cut(results, round_bytes);
  std::vector<Block> staged(ranks_.size());  // the first round is the largest
  for (size_t round = 0; round < own_results.size(); ++round) {
    const Stretches& own = rounds[place_][round];
    const int64_t bytes = bytes_of(own);
    for (size_t place = 0; place < ranks_.size(); ++place) {
      if (place == place_) continue;
      if (round == 0) staged[place] = call.allocate(bytes);
      const Block block{staged[place].data, bytes};
      call.receive(place, {&block, 1});
    }
    call.wait_for_received();
    int64_t offset = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      with_sum_types(own[i].dtype, [&]<class T, class Sum>() {
        const auto source = [&](size_t place) {
          const auto* others = static_cast<const std::byte*>(staged[place].data) + offset;
          return reinterpret_cast<const T*>(place == place_ ? own[i].data : others);
        };
        sum_elements<T, Sum>(
            ranks_.size(), source, 1,
            [&](size_t) { return reinterpret_cast<T*>(own_results[round][i].data); },
            {0, own[i].elements}, pool);
      });
      offset += own[i].elements * static_cast<int64_t>(size_of(own[i].dtype));
    }
  }
}

template <class Terms, class Results>
void PostGroup::Member::sum_for_all(const CollectiveCall& collective,
                                    std::span<const TensorView> tensors, const Terms& terms,
                                    const Results& results, ThreadPool& pool) {
  Call call(*this, collective, tensors);
  const Stretches own = results(place_);
  sum_share(call, terms, own, pool);
  // What comes may go to where terms lie that were sent.
  call.wait_for_sent();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place == place_) continue;
    call.send(place, blocks_of(own));
    call.receive(place, blocks_of(results(place)));
  }
  call.wait_for_received();
  call.wait_for_sent();
}

void PostGroup::Member::all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                                   ThreadPool& pool) {
  const auto share = [&](size_t place) {
    Stretches stretches;
    for (const TensorView& tensor : tensors) {
      stretches.push_back(
          stretch_of(tensor, share_of(tensor.shape.elements(), static_cast<int>(place), size())));
    }
    return stretches;
  };
  sum_for_all(call, tensors, share, share, pool);
}

void PostGroup::Member::sum(const CollectiveCall& call, const TensorView& own,
                            const TensorView& result, ThreadPool& pool) {
  const auto share = [&](const TensorView& tensor) {
    return [&](size_t place) {
      return Stretches{
          stretch_of(tensor, share_of(tensor.shape.elements(), static_cast<int>(place), size()))};
    };
  };
  const std::array tensors = {own, result};
  sum_for_all(call, tensors, share(own), share(result), pool);
}

Stretches PostGroup::Member::shards_at(std::span<const TensorView> tensors,
                                       std::span<const int16_t> owners, size_t place) const {
  Stretches stretches;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Shard shard{static_cast<int32_t>(place), size(), owner_of(owners, i)};
    stretches.push_back(stretch_of(tensors[i], shard_of(tensors[i].shape, shard)));
  }
  return stretches;
}

void PostGroup::Member::reduce_shards(const CollectiveCall& collective,
                                      std::span<const TensorView> tensors,
                                      std::span<const int16_t> owners, ThreadPool& pool) {
  const auto shard = [&](size_t place) { return shards_at(tensors, owners, place); };
  Call call(*this, collective, tensors);
  sum_share(call, shard, shard(place_), pool);
  call.wait_for_sent();
}

void PostGroup::Member::gather_shards(const CollectiveCall& collective,
                                      std::span<const TensorView> tensors,
                                      std::span<const int16_t> owners, ThreadPool& /*pool*/) {
  const auto shard = [&](size_t place) { return blocks_of(shards_at(tensors, owners, place)); };
  Call call(*this, collective, tensors);
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != place_) call.send(place, shard(place_));
  }
  call.gather_calls();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != place_) call.receive(place, shard(place));
  }
  call.wait_for_received();
  call.wait_for_sent();
}

void PostGroup::Member::reduce_scatter(const CollectiveCall& collective, const TensorView& own,
                                       const TensorView& result, ThreadPool& pool) {
  const int64_t elements = result.shape.elements();
  const auto part = [&](size_t place) {
    const auto at = static_cast<int64_t>(place);
    return Stretches{stretch_of(own, {at * elements, (at + 1) * elements})};
  };
  Call call(*this, collective, {&own, 1});
  sum_share(call, part, {stretch_of(result)}, pool);
  call.wait_for_sent();
}

namespace {

void copy(void* target, const void* source, int64_t bytes, ThreadPool& pool) {
  pool.parallel_ranges(bytes, kBlockCopyGrain, [&](int64_t begin, int64_t end, int) {
    std::memcpy(static_cast<std::byte*>(target) + begin,
                static_cast<const std::byte*>(source) + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace

void PostGroup::Member::all_gather(const CollectiveCall& collective, const TensorView& own,
                                   const TensorView& gathered, ThreadPool& pool) {
  const int64_t bytes = own.shape.elements() * static_cast<int64_t>(size_of(own.dtype));
  const std::vector<Block> sent(ranks_.size(), {own.data, bytes});
  std::vector<Block> received;
  for (int64_t place = 0; place < size(); ++place) {
    received.push_back({static_cast<std::byte*>(gathered.data) + place * bytes, bytes});
  }
  exchange_blocks(collective, {&own, 1}, sent, received, pool);
}

void PostGroup::Member::all_to_all(const CollectiveCall& call, std::span<const Block> sent,
                                   std::span<const Block> received, ThreadPool& pool) {
  exchange_blocks(call, {}, sent, received, pool);
}

void PostGroup::Member::exchange_blocks(const CollectiveCall& collective,
                                        std::span<const TensorView> tensors,
                                        std::span<const Block> sent,
                                        std::span<const Block> received, ThreadPool& pool) {
  Call call(*this, collective, tensors);
  // Every rank begins with the one after it, so that not all send to the same one at first.
  for (size_t step = 1; step < ranks_.size(); ++step) {
    const size_t place = (place_ + step) % ranks_.size();
    call.send(place, {&sent[place], 1});
  }
  call.gather_calls();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != place_) call.receive(place, {&received[place], 1});
  }
  TROUPE_CHECK(sent[place_].bytes == received[place_].bytes,
               "all_to_all: more or less than is expected");
  copy(received[place_].data, sent[place_].data, sent[place_].bytes, pool);
  call.wait_for_received();
  call.wait_for_sent();
}

void PostGroup::Member::open(const CollectiveCall& call, std::span<const Block> windows) {
  windows_ = windows;
  open_call_ = std::make_unique<Call>(*this, call, std::span<const TensorView>());
}

void PostGroup::Member::put(int member, size_t window, int64_t offset, Block bytes) {
  const auto place = static_cast<size_t>(member);
  if (place == place_) {
    const int64_t section = windows_[window].bytes / size();
    std::memcpy(static_cast<std::byte*>(windows_[window].data) + rank() * section + offset,
                bytes.data, static_cast<size_t>(bytes.bytes));
    return;
  }
  const std::lock_guard lock(put_mutex_);
  put_[place].push_back({window, offset, bytes});
}

// A member gets the number of bytes of each of its windows' sections, then these bytes.
void PostGroup::Member::close() {
  Call& call = *open_call_;
  const size_t windows = windows_.size();
  std::vector<Block> sent;
  std::vector<Block> received;
  for (size_t place = 0; place < ranks_.size(); ++place) {
    sent.push_back(call.allocate(static_cast<int64_t>(windows * sizeof(int64_t))));
    received.push_back(call.allocate(static_cast<int64_t>(windows * sizeof(int64_t))));
  }
  const auto length_at = [](const Block& lengths, size_t window) -> int64_t& {
    return static_cast<int64_t*>(lengths.data)[window];
  };
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place == place_) continue;
    std::vector<Put>& puts = put_[place];
    std::sort(puts.begin(), puts.end(), [](const Put& a, const Put& b) {
      return std::pair(a.window, a.offset) < std::pair(b.window, b.offset);
    });
    std::vector<Block> blocks;
    for (const Put& each : puts) {
      int64_t& length = length_at(sent[place], each.window);
      TROUPE_CHECK(each.offset == length, "a section of a window has a gap");
      length += each.bytes.bytes;
      blocks.push_back(each.bytes);
    }
    puts.clear();
    call.send(place, {&sent[place], 1});
    call.send(place, blocks);
  }
  call.gather_calls();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != place_) call.receive(place, {&received[place], 1});
  }
  call.wait_for_received();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place == place_) continue;
    std::vector<Block> blocks;
    for (size_t window = 0; window < windows; ++window) {
      const int64_t section = windows_[window].bytes / size();
      const int64_t length = length_at(received[place], window);
      if (length < 0 || length > section) {
        throw_failed(fmt::format("Rank {} writes {} bytes to a section of {}. All ranks end.",
                                 ranks_[place], length, section));
      }
      blocks.push_back(
          {static_cast<std::byte*>(windows_[window].data) + static_cast<int64_t>(place) * section,
           length});
    }
    call.receive(place, blocks);
  }
  call.wait_for_received();
  call.wait_for_sent();
  open_call_.reset();
}

void PostGroup::Member::prefix_sum(const CollectiveCall& collective, const TensorView& own,
                                   const TensorView& running, const TensorView& total) {
  const auto elements = static_cast<size_t>(own.shape.elements());
  Call call(*this, collective, {&own, 1});
  std::vector<Block> counts;
  for (size_t place = 0; place < ranks_.size(); ++place) {
    if (place != place_) call.send(place, blocks_of({stretch_of(own)}));
  }
  call.gather_calls();
  for (size_t place = 0; place < ranks_.size(); ++place) {
    counts.push_back(call.allocate(static_cast<int64_t>(elements * sizeof(int32_t))));
    if (place != place_) call.receive(place, {&counts[place], 1});
  }
  call.wait_for_received();
  sum_counts(
      size(), rank(), elements,
      [&](int place) {
        const auto at = static_cast<size_t>(place);
        return at == place_ ? own.as<int32_t>() : static_cast<const int32_t*>(counts[at].data);
      },
      running.as<int32_t>(), total.as<int32_t>());
  call.wait_for_sent();
}

void PostGroup::Member::send(const CollectiveCall& call, const TensorView& tensor, int to) {
  const std::lock_guard lock(group_.mutex_);
  if (group_.failure_) std::rethrow_exception(group_.failure_);
  const auto place = static_cast<size_t>(to);
  const Announcement announcement = describe(Kind::message, call, {&tensor, 1});
  group_.post_.send_message(ranks_[place], to_bytes(announcement));
  sent_[place].push_back(
      group_.post_.send(ranks_[place], announcement.channel, blocks_of({stretch_of(tensor)})));
  ++group_.messages_;
  group_.changed_.notify_one();
}

void PostGroup::Member::finish_send(const CollectiveCall& call, int to) {
  std::unique_lock lock(group_.mutex_);
  const auto place = static_cast<size_t>(to);
  TROUPE_CHECK(!sent_[place].empty(), "a send that is finished twice");
  const Post::Transfer transfer = sent_[place].front();
  sent_[place].pop_front();
  group_.wait_for(lock, site_of(call), ranks_[place], transfer);
  --group_.messages_;
}

void PostGroup::Member::receive(const CollectiveCall& call, const TensorView& tensor, int from) {
  std::unique_lock lock(group_.mutex_);
  const int32_t sender = ranks_[static_cast<size_t>(from)];
  std::deque<Announcement>& messages = group_.mail_[room_].messages[sender];
  group_.wait(lock, {site_of(call), true, [&] { return std::vector{sender}; }},
              [&] { return !messages.empty(); });
  const Announcement message = std::move(messages.front());
  messages.pop_front();
  if (!same_type(message.tensors.front(), tensor)) {
    throw_failed(wrong_type_message(
        {sender, message.site(), message.tensors, group_.process_of(sender)},
        {group_.rank_, site_of(call), {&tensor, 1}, group_.process_of(group_.rank_)}));
  }
  group_.wait_for(lock, site_of(call), sender,
                  group_.post_.receive(sender, message.channel, blocks_of({stretch_of(tensor)})));
}

PostGroup::PostGroup(Post& post, std::chrono::milliseconds limit, Fail fail)
    : ProcessGroup(limit, {post.rank()}, post.machine_of_rank()),
      post_(post),
      rank_(post.rank()),
      ended_(static_cast<size_t>(post.size())),
      seen_(static_cast<size_t>(post.size())),
      waits_for_(static_cast<size_t>(post.size())),
      heard_(static_cast<size_t>(post.size())),
      gone_(static_cast<size_t>(post.size())),
      lowest_failed_(post.size()),
      fail_(std::move(fail)),
      mover_([this] { move_messages(); }) {}

PostGroup::~PostGroup() {
  stop();
}

void PostGroup::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_one();
  }
  if (mover_.joinable()) mover_.join();
}

void PostGroup::move_messages() {
  constexpr std::chrono::microseconds kMoving{200};
  constexpr std::chrono::milliseconds kIdle{100};
  std::unique_lock lock(mutex_);
  while (!is_over_) {
    try {
      read_messages();
    } catch (const UserError&) {  // of the post
      if (!failure_) failure_ = std::current_exception();
      return;
    }
    changed_.wait_for(lock, messages_ > 0 ? kMoving : kIdle);
  }
}

std::string PostGroup::name_of_rank(int32_t rank) const {
  return rank_name(rank, process_of(rank));
}

Communicator& PostGroup::member(int rank, const std::vector<int32_t>& members) {
  TROUPE_CHECK(rank == rank_ && std::is_sorted(members.begin(), members.end()) &&
                   std::binary_search(members.begin(), members.end(), rank) &&
                   members.front() >= 0 && members.back() < size(),
               "the members of a communicator");
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Member>& member = members_[members];
  if (!member) member = std::make_unique<Member>(*this, members);
  return *member;
}

PostGroup::Member& PostGroup::member_of_all() {
  return static_cast<Member&>(member(rank_, ranks_below(size())));
}

std::vector<uint64_t> PostGroup::exchange(int /*rank*/, uint64_t value) {
  Member& all = member_of_all();
  std::unique_lock lock(mutex_);
  std::vector<uint64_t> values;
  for (const Announcement& each :
       all.gather_calls(lock, all.announce(Kind::exchange, value, {}, {}))) {
    values.push_back(each.number);
  }
  return values;
}

std::vector<std::string> PostGroup::gather(int /*rank*/, std::string bytes) {
  Member& all = member_of_all();
  std::unique_lock lock(mutex_);
  const std::vector<Announcement> announced =
      all.gather_calls(lock, all.announce(Kind::exchange, bytes.size(), {}, {}));
  const auto own = static_cast<size_t>(rank_);
  const auto wait_for = [&](size_t other, Post::Transfer transfer) {
    wait(lock,
         {{},
          false,
          [&] { return std::vector{static_cast<int32_t>(other)}; },
          /*for_transfer=*/true},
         [&] { return post_.done(transfer); });
  };
  gathered_.assign(announced.size(), {});
  gathered_[own] = std::move(bytes);
  // In pieces, so that memory is only taken for what comes.
  const auto piece = [](std::string& text, uint64_t at, uint64_t size) {
    return Block{text.data() + at,
                 static_cast<int64_t>(std::min<uint64_t>(kGatheredPiece, size - at))};
  };
  if (rank_ != 0) {
    const uint64_t size = gathered_[own].size();
    for (uint64_t at = 0; at < size; at += kGatheredPiece) {
      const Block block = piece(gathered_[own], at, size);
      wait_for(0, post_.send(0, announced[own].channel, {&block, 1}));
    }
    return {};
  }
  for (size_t rank = 1; rank < announced.size(); ++rank) {
    std::string& text = gathered_[rank];
    const uint64_t size = announced[rank].number;
    for (uint64_t at = 0; at < size; at += kGatheredPiece) {
      text.resize(std::min<uint64_t>(size, at + kGatheredPiece));
      const Block block = piece(text, at, size);
      wait_for(rank, post_.receive(static_cast<int>(rank), announced[rank].channel, {&block, 1}));
    }
  }
  return std::move(gathered_);
}

int PostGroup::next_channel() {
  last_channel_ = (last_channel_ + 1) % Post::kChannels;
  return last_channel_;
}

void PostGroup::announce_to_all(const Announcement& announcement) {
  const std::string bytes = to_bytes(announcement);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_) post_.send_message(rank, bytes);
  }
}

void PostGroup::read_messages() {
  while (std::optional<Post::Message> message = post_.next_message()) {
    Announcement announcement = from_bytes(message->bytes, message->from, size());
    const auto from = static_cast<size_t>(message->from);
    heard_[from] = Clock::now();
    switch (announcement.kind) {
      case Kind::asks:
        post_.send_message(message->from,
                           to_bytes({.kind = Kind::answers, .text = {}, .tensors = {}}));
        break;
      case Kind::answers:
        break;
      case Kind::ended:
        ended_[from] = announcement.number;
        break;
      case Kind::failed:
        if (announcement.index == rank_) break;  // passed on by somebody
        lowest_failed_ = std::min(lowest_failed_, announcement.index);
        if (failure_) break;
        origin_ = announcement.index;
        failure_ =
            std::make_exception_ptr(UserError(status_of(announcement.number), announcement.text));
        break;
      case Kind::spoken:
        speaker_ = message->from;
        break;
      case Kind::waits:
        waits_for_[from] = std::move(announcement.waits_for);
        seen_[from] = announcement.site();
        seen_[from].operation = *names_.insert(announcement.text).first;
        break;
      default: {
        waits_for_[from].clear();
        seen_[from] = announcement.site();
        seen_[from].operation = *names_.insert(announcement.text).first;
        Mail& mail = mail_[announcement.room];
        auto& queues = announcement.kind == Kind::message ? mail.messages : mail.calls;
        queues[message->from].push_back(std::move(announcement));
        break;
      }
    }
  }
  while (const std::optional<int32_t> rank = post_.next_gone()) {
    const auto at = static_cast<size_t>(*rank);
    gone_[at] = true;
    if (failure_ || ended_[at] == kEnd) continue;
    failure_ = std::make_exception_ptr(
        UserError(ExitStatus::failed, lost_message(*rank, process_of(*rank), seen_[at])));
  }
}

bool PostGroup::has_ended(int32_t rank) const {
  return ended_[static_cast<size_t>(rank)] >= (runs_now_ ? runs_ : kEnd);
}

bool PostGroup::is_silent(int32_t rank, Clock::time_point start) const {
  return Clock::now() - std::max(start, heard_[static_cast<size_t>(rank)]) > limit();
}

template <class Done>
void PostGroup::wait(std::unique_lock<std::mutex>& lock, const Wait& wait, const Done& done) {
  const Clock::time_point start = Clock::now();
  Clock::time_point next_message = start + limit() / 2;
  for (int polls = 0;; ++polls) {
    read_messages();
    if (failure_) {
      post_.drop_transfers();
      std::rethrow_exception(failure_);
    }
    if (done()) return;
    const std::vector<int32_t> absent = wait.absent();
    const auto any_absent = [&](const auto& condition) {
      return std::any_of(absent.begin(), absent.end(), condition);
    };
    const Clock::time_point now = Clock::now();
    if (now > next_message) {
      next_message = now + limit() / 2;
      if (wait.has_limit) {
        // Ranks that wait for this one are to know that it is not the one to blame.
        announce_to_all({.kind = Kind::waits,
                         .index = wait.site.index,
                         .layer = wait.site.layer,
                         .micro_batch = wait.site.micro_batch,
                         .text = std::string(wait.site.operation),
                         .tensors = {},
                         .waits_for = absent});
      } else {
        const std::string question = to_bytes({.kind = Kind::asks, .text = {}, .tensors = {}});
        for (const int32_t rank : absent) post_.send_message(rank, question);
      }
    }
    const bool too_late = wait.has_limit
                              ? now - start > limit()
                              : any_absent([&](int32_t rank) { return is_silent(rank, start); });
    if (too_late ||
        (!wait.for_transfer && any_absent([&](int32_t rank) { return has_ended(rank); }))) {
      post_.drop_transfers();
      throw_failed(missing(wait));
    }
    lock.unlock();
    pause(polls);
    lock.lock();
  }
}

void PostGroup::wait_for(std::unique_lock<std::mutex>& lock, const CallSite& site, int32_t other,
                         Post::Transfer transfer) {
  wait(lock, {site, true, [&] { return std::vector{other}; }, /*for_transfer=*/true},
       [&] { return post_.done(transfer); });
}

std::string PostGroup::missing(const Wait& wait) const {
  using State = AbsentRank::State;
  std::vector<AbsentRank> absent;
  // Ranks that wait themselves are followed by those that they wait for: one of these is to blame.
  std::vector<int32_t> ranks = wait.absent();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int32_t rank = ranks[i];
    const auto at = static_cast<size_t>(rank);
    AbsentRank each{.rank = rank, .last_seen = seen_[at], .process = process_of(rank)};
    if (has_ended(rank)) {
      each.state = State::has_ended;
    } else if (!wait.has_limit) {
      if (!is_silent(rank, {})) continue;
      each.state = State::is_silent;
    } else if (!waits_for_[at].empty()) {
      each.state = State::waits;
      each.waits_for = waits_for_[at];
      for (const int32_t next : each.waits_for) {
        if (next != rank_ && std::find(ranks.begin(), ranks.end(), next) == ranks.end()) {
          ranks.push_back(next);
        }
      }
    }
    absent.push_back(std::move(each));
  }
  return missing_message(rank_, process_of(rank_), wait.site, limit(), absent);
}

namespace {

// What the exception says, for others.
std::pair<ExitStatus, std::string> contents_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const UserError& error) {
    return {error.status(), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitStatus::failed, "out of memory."};
  } catch (const std::exception& error) {
    return {ExitStatus::failed, error.what()};
  }
}

}  // namespace

void PostGroup::run(const std::function<void(int)>& body) {
  ++runs_;
  runs_now_ = true;
  try {
    body(rank_);
  } catch (...) {
    const auto [status, message] = contents_of(std::current_exception());
    fail_(status, message);
  }
  runs_now_ = false;
  end(runs_);
}

void PostGroup::end(uint64_t number) {
  std::unique_lock lock(mutex_);
  announce_to_all({.kind = Kind::ended, .number = number, .text = {}, .tensors = {}});
  ended_[static_cast<size_t>(rank_)] = number;
  const auto absent = [&] {
    std::vector<int32_t> ranks;
    for (size_t rank = 0; rank < ended_.size(); ++rank) {
      if (ended_[rank] < number) ranks.push_back(static_cast<int32_t>(rank));
    }
    return ranks;
  };
  wait(lock, {{}, false, absent}, [&] { return absent().empty(); });
}

void PostGroup::finish() {
  end(kEnd);
  stop();
}

bool PostGroup::announce_failure(ExitStatus status, const std::string& message) {
  std::unique_lock lock(mutex_);
  post_.drop_transfers();
  const bool is_own = origin_ < 0;
  // Also on from another rank: who finds this one gone must know why.
  announce_to_all({.kind = Kind::failed,
                   .number = static_cast<uint64_t>(status),
                   .index = is_own ? rank_ : origin_,
                   .text = message,
                   .tensors = {}});
  const auto speak = [&] {
    announce_to_all({.kind = Kind::spoken, .text = {}, .tensors = {}});
    return true;
  };
  const auto is_gone = [&](int32_t rank) { return gone_[static_cast<size_t>(rank)]; };
  auto end = Clock::now() + (is_own ? 1 : 2) * kSpeakerLimit;
  bool hears = false;
  do {
    read_messages();
    if (!hears && speaker_ >= 0) {
      hears = true;
      end = Clock::now() + kEndLimit;
    }
    if (hears && is_gone(speaker_)) return false;
    const std::vector<int32_t> below = ranks_below(rank_);
    const bool leads = std::all_of(below.begin(), below.end(), is_gone);
    if (leads && !hears) return speak();
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  } while (Clock::now() < end);
  return !hears && is_own && rank_ < lowest_failed_ && speak();
}

std::string time_for_logs() {
  if (isatty(STDERR_FILENO) != 0) return {};
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  std::array<char, 64> text{};
  if (localtime_r(&now, &local) == nullptr) return {};
  const size_t length = std::strftime(text.data(), text.size(), " [%F %T %z]", &local);
  return {text.data(), length};
}

ProcessGroup& PostProcesses::group(std::chrono::milliseconds limit) {
  TROUPE_CHECK(group_ == nullptr, "processes form one group");
  group_ = std::make_unique<PostGroup>(
      *post_, limit,
      [this](ExitStatus status, const std::string& message) { fail(status, message); });
  return *group_;
}

PostGroup& PostProcesses::group() {
  if (group_ == nullptr) group(kCollectiveLimit);
  return *group_;
}

void PostProcesses::finish() {
  group().finish();
  post_->finish();
}

void PostProcesses::fail(ExitStatus status, const std::string& message) {
  // A program may have taken this signal for a request. A launcher sends it when a rank fails: to
  // end those that need not speak any more, or before anybody could.
  std::signal(SIGTERM, post_->ends_all() ? SIG_DFL : SIG_IGN);
  bool speaks = true;
  try {
    speaks = group().announce_failure(status, message);
    group().stop();
  } catch (const std::exception&) {
    // The others cannot be reached. They are ended all the same.
  }
  if (speaks) std::fprintf(stderr, "troupe: %s%s\n", message.c_str(), time_for_logs().c_str());
  std::fflush(nullptr);
  post_->abort(static_cast<int>(status));
  std::_Exit(static_cast<int>(status));
}

}  // namespace troupe
