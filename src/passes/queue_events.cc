#include "passes/queue_events.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "base/id_vector.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// By queue: the latest operation of which something is true; -1: none.
using Latest = std::array<int32_t, kQueueCount>;
constexpr Latest kNone = [] {
  Latest latest{};
  latest.fill(-1);
  return latest;
}();

size_t queue_of(const Program& program, int32_t index) {
  return static_cast<size_t>(program.op(index).place.queue);
}

// That of the group by which an operation reaches other ranks; nothing where it reaches none.
std::optional<size_t> queue_of_group(const Op& op) {
  if (op.spec->group == nullptr) return std::nullopt;
  return static_cast<size_t>(queue_of(op.spec->group(op.attributes)));
}

bool has_one_queue(const Program& program) {
  for (int32_t index = 1; index < program.op_count(); ++index) {
    if (queue_of(program, index) != queue_of(program, 0)) return false;
  }
  return true;
}

// That an operation reads or writes something.
struct Use {
  int32_t index;
  size_t queue;
  bool writes;
};

// The last uses of something.
struct LastUses {
  int32_t written = -1;
  Latest read = kNone;  // since then

  // Calls earlier(operation) for what the use has to wait for, and notes it. A write has waited for
  // all uses so far: what waits for it waits for them.
  template <class Earlier>
  void add(const Use& use, const Earlier& earlier) {
    earlier(written);
    if (use.writes) {
      for (const int32_t reader : read) earlier(reader);
      *this = {.written = use.index, .read = kNone};
    } else {
      read[use.queue] = use.index;
    }
  }
};

// Of every byte that the values have.
class LastUsesOfBytes {
 public:
  explicit LastUsesOfBytes(IdVector<ValueId, Bytes> bytes) : bytes_(std::move(bytes)) {}

  template <class Earlier>
  void add(ValueId id, const Use& use, const Earlier& earlier) {
    add(bytes_[id], use, earlier);
  }

 private:
  using Pieces = std::map<uint64_t, LastUses>;  // by first byte; each ends where the next begins

  template <class Earlier>
  void add(Bytes bytes, const Use& use, const Earlier& earlier) {
    if (bytes.begin == bytes.end) return;
    const auto end = cut(bytes.end);
    const auto begin = cut(bytes.begin);
    for (auto piece = begin; piece != end; ++piece) piece->second.add(use, earlier);
    if (use.writes) pieces_.erase(std::next(begin), end);
  }

  // The piece that begins here.
  Pieces::iterator cut(uint64_t at) {
    const auto behind = pieces_.upper_bound(at);
    const auto piece = std::prev(behind);
    return piece->first == at ? piece : pieces_.emplace_hint(behind, at, piece->second);
  }

  IdVector<ValueId, Bytes> bytes_;
  Pieces pieces_{{0, {}}};
};

// The same as if no memory was used again.
class LastUsesOfValues {
 public:
  explicit LastUsesOfValues(const Program& program)
      : program_(program), uses_(program.value_count()) {}

  template <class Earlier>
  void add(ValueId id, const Use& use, const Earlier& earlier) {
    if (program_.value(id).bytes() > 0) uses_[id].add(use, earlier);
  }

 private:
  const Program& program_;
  IdVector<ValueId, LastUses> uses_;
};

// Calls visit(value, writes) for all that an operation touches; what it only reads comes first.
template <class Visit>
void for_each_operand(const Program& program, const Op& op, Device device, const Visit& visit) {
  const auto counter_of = [&](ValueId id) {
    const RowCount& rows = program.value(id).rows;
    if (rows.valid()) visit(rows.counter, false);
  };
  for (const ValueId id : program.inputs(op)) {
    if (!id.valid()) continue;
    counter_of(id);
    visit(id, false);
  }
  for (const ValueId id : program.outputs(op)) counter_of(id);
  for (const ValueId id : program.outputs(op)) visit(id, true);
  if (op.workspace.valid() && device == Device::cpu) visit(op.workspace, true);
}

struct Order {
  std::vector<QueueEvent> events;
  // By operation: what has ended for sure when it begins.
  OpVector<Latest> ended;
};

template <class Uses>
Order order_queues(const Program& program, Uses uses, Device device) {
  Order order;
  order.ended.resize(program.op_count(), kNone);
  // By the queue of a group: the way to other ranks, as if it was memory that is written.
  std::array<LastUses, kQueueCount> other_ranks;
  std::array<Latest, kQueueCount> known;  // by queue: what has ended when its next operation begins
  known.fill(kNone);
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const size_t queue = queue_of(program, index);
    Latest& ended = order.ended[index];
    ended = known[queue];
    Latest wanted = kNone;
    const auto want = [&](int32_t earlier) {
      if (earlier < 0 || earlier == index) return;
      int32_t& latest = wanted[queue_of(program, earlier)];
      latest = std::max(latest, earlier);
    };
    for_each_operand(program, op, device, [&](ValueId id, bool writes) {
      uses.add(id, Use{index, queue, writes}, want);
    });
    if (const auto of = queue_of_group(op)) other_ranks[*of].add({index, queue, true}, want);

    // What one wait implies needs no other.
    const auto is_implied = [&](size_t of) {
      if (wanted[of] <= ended[of]) return true;
      return std::any_of(wanted.begin(), wanted.end(), [&](int32_t other) {
        return other >= 0 && order.ended[other][of] >= wanted[of];
      });
    };
    std::array<bool, kQueueCount> waits{};
    for (size_t of = 0; of < kQueueCount; ++of) waits[of] = of != queue && !is_implied(of);
    for (size_t of = 0; of < kQueueCount; ++of) {
      if (!waits[of]) continue;
      const int32_t before = wanted[of];
      order.events.push_back({.before = before, .after = index});
      const Latest& with_it = order.ended[before];
      for (size_t i = 0; i < kQueueCount; ++i) ended[i] = std::max(ended[i], with_it[i]);
      ended[of] = std::max(ended[of], before);
    }
    known[queue] = ended;
    known[queue][queue] = index;
  }
  return order;
}

// Stretches of one layer's work on the compute queue, by their last operations. Weight gradients do
// not count: delayed, they stand in other layers.
struct LayerStretches {
  std::vector<int32_t> ends;
  std::tuple<int16_t, int16_t, int32_t> layer;

  void add(int32_t index, const Place& place) {
    const std::tuple next(place.layer, place.chunk, place.micro_batch);
    if (std::exchange(layer, next) != next || ends.empty()) ends.push_back(index);
    ends.back() = index;
  }
  int32_t end_of(size_t number, int32_t otherwise) const {
    return number < ends.size() ? ends[number] : otherwise;
  }
};

// By operation: the last operation of the layer to which the compute queue goes on after the one
// that it is in then, or of the next layer of the operation's own forward or backward, which may
// take turns with another one, whichever is later.
std::vector<int32_t> find_ends_of_next_layer(const Program& program) {
  using Pass = std::tuple<int32_t, int16_t, bool>;  // micro-batch, chunk, forward?
  LayerStretches all;
  std::map<Pass, LayerStretches> of_passes;
  const auto own = [&](const Place& place) -> LayerStretches& {
    return of_passes[{place.micro_batch, place.chunk, place.phase == Phase::forward}];
  };
  OpVector<std::pair<size_t, size_t>> begun(program.op_count());  // of all, of its own
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Place& place = program.op(index).place;
    if (place.queue == Queue::compute && place.phase != Phase::weight_gradient) {
      all.add(index, place);
      own(place).add(index, place);
    }
    begun[index] = {all.ends.size(), own(place).ends.size()};
  }
  std::vector<int32_t> result;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const auto [of_all, of_own] = begun[index];
    const Place& place = program.op(index).place;
    const int32_t end = all.end_of(of_all, program.op_count() - 1);
    const bool has_own = place.micro_batch >= 0 && of_own > 0;
    result.push_back(has_own ? std::max(end, own(place).end_of(of_own, end)) : end);
  }
  return result;
}

std::string describe(const Program& program, int32_t index) {
  const Op& op = program.op(index);
  return "operation " + std::to_string(index) + " (" + op.spec->name + ", " +
         std::string(name_of(op.place.queue)) + ")";
}

// All operations that touch bytes in conflict, found one after the other: by vector clocks over the
// order of the queues and the events, and by the last uses of every elementary piece of memory on
// every queue. Nothing is concluded from what earlier operations waited for, but by the clocks.
class FaultFinder {
 public:
  FaultFinder(const Program& program, const MemoryPlan& plan, std::span<const QueueEvent> events)
      : program_(program),
        device_(plan.device),
        events_(events),
        bytes_(bytes_of_values(program, plan)) {
    for (const Bytes& each : bytes_) {
      boundaries_.push_back(each.begin);
      boundaries_.push_back(each.end);
    }
    std::sort(boundaries_.begin(), boundaries_.end());
    boundaries_.erase(std::unique(boundaries_.begin(), boundaries_.end()), boundaries_.end());
    pieces_.resize(boundaries_.size());
  }

  std::optional<std::string> find() {
    OpVector<Latest> clocks(program_.op_count(), kNone);
    Latest last = kNone;
    Latest last_between_ranks = kNone;  // by the queue of their group
    size_t next = 0;
    for (int32_t index = 0; index < program_.op_count(); ++index) {
      const Op& op = program_.op(index);
      const size_t queue = queue_of(program_, index);
      Latest& clock = clocks[index];
      if (last[queue] >= 0) clock = clocks[last[queue]];
      for (; next < events_.size() && events_[next].after == index; ++next) {
        const int32_t before = events_[next].before;
        if (before < 0 || before >= index || queue_of(program_, before) == queue) {
          return "no event: from " + std::to_string(before) + " to " + describe(program_, index);
        }
        const Latest& other = clocks[before];
        for (size_t i = 0; i < kQueueCount; ++i) clock[i] = std::max(clock[i], other[i]);
      }
      clock[queue] = last[queue] = index;

      const auto fault = [&](int32_t earlier, const std::string& why) {
        return describe(program_, index) + " does not wait for " + describe(program_, earlier) +
               why;
      };
      if (const auto of = queue_of_group(op)) {
        const int32_t earlier = std::exchange(last_between_ranks[*of], index);
        if (earlier >= 0 && clock[queue_of(program_, earlier)] < earlier) {
          return fault(earlier, ", which reaches other ranks before it");
        }
      }
      ValueId touched;
      int32_t earlier = -1;
      const auto touch = [&](ValueId id, bool writes) {
        if (!id.valid() || earlier >= 0) return;
        touched = id;
        earlier = touch_pieces(id, writes, index, clock);
      };
      for (const ValueId id : program_.inputs(op)) touch(id, false);
      for (const ValueId id : program_.inputs(op)) {
        if (id.valid()) touch(program_.value(id).rows.counter, false);
      }
      for (const ValueId id : program_.outputs(op)) {
        touch(program_.value(id).rows.counter, false);
        touch(id, true);
      }
      if (device_ == Device::cpu) touch(op.workspace, true);
      if (earlier >= 0) return fault(earlier, ", which uses memory of " + name(touched));
    }
    if (next < events_.size()) return "events are not in the order of the operations that wait";
    return std::nullopt;
  }

 private:
  struct Piece {
    Latest read = kNone;
    Latest written = kNone;
  };

  std::string name(ValueId id) const { return program_.value(id).name; }

  // Returns an operation in conflict that the clock does not know, or -1.
  int32_t touch_pieces(ValueId id, bool writes, int32_t index, const Latest& clock) {
    const Bytes bytes = bytes_[id];
    auto piece =
        static_cast<size_t>(std::lower_bound(boundaries_.begin(), boundaries_.end(), bytes.begin) -
                            boundaries_.begin());
    const size_t queue = queue_of(program_, index);
    for (; boundaries_[piece] < bytes.end; ++piece) {
      Piece& uses = pieces_[piece];
      for (size_t i = 0; i < kQueueCount; ++i) {
        if (uses.written[i] > clock[i]) return uses.written[i];
        if (writes && uses.read[i] > clock[i]) return uses.read[i];
      }
      (writes ? uses.written : uses.read)[queue] = index;
    }
    return -1;
  }

  const Program& program_;
  const Device device_;
  const std::span<const QueueEvent> events_;
  const IdVector<ValueId, Bytes> bytes_;
  std::vector<uint64_t> boundaries_;
  std::vector<Piece> pieces_;  // piece i begins at boundary i
};

}  // namespace

std::vector<QueueEvent> find_queue_events(const Program& program, const MemoryPlan& plan) {
  if (has_one_queue(program)) return {};
  return order_queues(program, LastUsesOfBytes(bytes_of_values(program, plan)), plan.device).events;
}

std::optional<std::string> find_queue_fault(const Program& program, const MemoryPlan& plan,
                                            std::span<const QueueEvent> events) {
  if (has_one_queue(program) && events.empty()) return std::nullopt;
  return FaultFinder(program, plan, events).find();
}

void verify_queue_events(const Program& program, const MemoryPlan& plan,
                         std::span<const QueueEvent> events) {
  const std::optional<std::string> fault = find_queue_fault(program, plan, events);
  TROUPE_CHECK(!fault.has_value(), *fault);
}

IdVector<ValueId, int32_t> find_queue_reservations(const Program& program) {
  IdVector<ValueId, int32_t> until(program.value_count(), -1);
  if (has_one_queue(program)) return until;
  const Order order = order_queues(program, LastUsesOfValues(program), Device::cpu);
  // By operation of another queue: the first of the compute queue that waits for it.
  OpVector<int32_t> awaited_by(program.op_count(), program.op_count());
  std::array<std::deque<int32_t>, kQueueCount> unawaited;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (program.op(index).place.queue != Queue::compute) {
      unawaited[queue_of(program, index)].push_back(index);
      continue;
    }
    for (size_t of = 0; of < kQueueCount; ++of) {
      std::deque<int32_t>& left = unawaited[of];
      for (; !left.empty() && left.front() <= order.ended[index][of]; left.pop_front()) {
        awaited_by[left.front()] = index;
      }
    }
  }
  const std::vector<int32_t> ends = find_ends_of_next_layer(program);
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.place.queue == Queue::compute) continue;
    const int32_t last = std::min(awaited_by[index] - 1, ends[static_cast<size_t>(index)]);
    for_each_operand(program, op, Device::cuda, [&](ValueId id, bool) {
      if (is_on_host(program.value(id).role)) return;  // compute has no part in that
      int32_t& reserved = until[id];
      reserved = std::max(reserved, last);
    });
  }
  return until;
}

}  // namespace troupe
