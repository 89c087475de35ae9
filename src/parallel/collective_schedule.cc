#include "parallel/collective_schedule.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ops/pipeline_message/pipeline_message.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Of ranks in a message, before it goes on with their number.
constexpr size_t kNamedRanks = 16;

RankGroup group_of(const Op& op) {
  return op.spec->group(op.attributes);
}

// What the operation hands over, or what it gets.
std::span<const ValueId> tensors_of(const Program& program, const Op& op) {
  return op.input_count > 0 ? program.inputs(op) : program.outputs(op);
}

std::string describe(const Program& program, int32_t index) {
  const Op& op = program.op(index);
  std::string text = fmt::format("operation {} ({}", index, op.spec->name);
  if (op.place.layer >= 0) text += fmt::format(", layer {}", op.place.layer);
  if (op.place.micro_batch >= 0) text += fmt::format(", micro-batch {}", op.place.micro_batch);
  text += fmt::format(", group {}) of", name_of(group_of(op)));
  for (const ValueId id : tensors_of(program, op)) {
    if (!id.valid()) continue;
    const Value& value = program.value(id);
    text += fmt::format(" {} {} {}", value.name, name_of(value.dtype), value.shape.to_string());
  }
  return text;
}

bool same_tensor(const Program& a, ValueId x, const Program& b, ValueId y) {
  if (!x.valid() || !y.valid()) return x.valid() == y.valid();
  return a.value(x).dtype == b.value(y).dtype && a.value(x).shape == b.value(y).shape;
}

bool same_tensors(const Program& a, const Op& x, const Program& b, const Op& y) {
  const auto inputs = tensors_of(a, x);
  const auto others = tensors_of(b, y);
  return std::equal(inputs.begin(), inputs.end(), others.begin(), others.end(),
                    [&](ValueId i, ValueId j) { return same_tensor(a, i, b, j); });
}

[[noreturn]] void refuse(const std::string& difference) {
  throw UserError(
      ExitStatus::does_not_fit,
      "The ranks' programs do not fit together and would wait for each other for ever: " +
          difference);
}

// The collectives and messages of all ranks, and whom they are for.
class Schedule {
 public:
  Schedule(std::span<const Program* const> programs, const Layout& layout)
      : programs_(programs), layout_(layout), ranks_(programs.size()) {
    TROUPE_CHECK(programs.size() == static_cast<size_t>(layout.world_size()),
                 "a program of each rank");
    for (size_t rank = 0; rank < ranks_.size(); ++rank) read_program(static_cast<int32_t>(rank));
  }

  void check_collectives() const {
    for (const Group& group : groups_) {
      const int32_t first = group.members.front();
      for (const int32_t rank : group.members) {
        if (rank != first) compare(group, first, rank);
      }
    }
  }

  void check_messages() const {
    for (const Way& way : ways_) {
      const Program& sender = program(way.from);
      const Program& receiver = program(way.to);
      const size_t both = std::min(way.sends.size(), way.receives.size());
      for (size_t i = 0; i < both; ++i) {
        if (same_tensors(sender, sender.op(way.sends[i]), receiver, receiver.op(way.receives[i]))) {
          continue;
        }
        refuse(fmt::format("message {} from rank {} is sent in {} and received by rank {} in {}.",
                           i, way.from, describe(sender, way.sends[i]), way.to,
                           describe(receiver, way.receives[i])));
      }
      if (way.sends.size() > both) {
        refuse(fmt::format("rank {} never receives message {} from rank {}, which is sent in {}.",
                           way.to, both, way.from, describe(sender, way.sends[both])));
      }
      if (way.receives.size() > both) {
        refuse(fmt::format("rank {} never sends message {} to rank {}, which is received in {}.",
                           way.from, both, way.to, describe(receiver, way.receives[both])));
      }
      check_ends(way);
    }
  }

  // Carries all programs out.
  void check_progress() {
    std::vector<int32_t> ready(ranks_.size());
    for (size_t rank = 0; rank < ready.size(); ++rank) ready[rank] = static_cast<int32_t>(rank);
    while (!ready.empty()) {
      const int32_t rank = ready.back();
      ready.pop_back();
      while (advance(rank, ready)) {
      }
    }
    refuse_waiting();
  }

 private:
  enum class Kind : uint8_t { collective, send, finish, receive };
  struct Event {
    int32_t index = 0;   // of the operation
    int32_t target = 0;  // in groups_, or in ways_
    Kind kind = Kind::collective;
  };
  struct Rank {
    std::vector<Event> events;
    size_t next = 0;
    bool waits_for_peer = false;  // in a message
  };
  struct Group {
    std::vector<int32_t> members;
    std::vector<std::vector<int32_t>> operations;  // by place
    std::vector<int32_t> arrived;
  };
  // Messages from one rank to another.
  struct Way {
    int32_t from = 0;
    int32_t to = 0;
    std::vector<int32_t> sends = {};
    std::vector<int32_t> finishes = {};
    std::vector<int32_t> receives = {};
    size_t sent = 0;
    size_t finished = 0;
    size_t received = 0;
  };

  const Program& program(int32_t rank) const { return *programs_[static_cast<size_t>(rank)]; }
  Rank& at(int32_t rank) { return ranks_[static_cast<size_t>(rank)]; }

  static size_t place_in(const Group& group, int32_t rank) {
    return static_cast<size_t>(std::lower_bound(group.members.begin(), group.members.end(), rank) -
                               group.members.begin());
  }

  // The number in groups_ of the rank's group of that kind; -1: it belongs to none.
  int32_t find_group(RankGroup kind, int32_t rank) {
    std::vector<int32_t>& numbers = group_numbers_[static_cast<size_t>(kind)];
    if (numbers.empty()) {
      numbers.assign(ranks_.size(), -1);
      for (std::vector<int32_t>& members : layout_.groups(kind)) {
        for (const int32_t member : members) {
          numbers[static_cast<size_t>(member)] = static_cast<int32_t>(groups_.size());
        }
        const size_t size = members.size();
        groups_.push_back({std::move(members), std::vector<std::vector<int32_t>>(size), {}});
      }
    }
    return numbers[static_cast<size_t>(rank)];
  }

  int32_t find_way(RankGroup kind, int32_t from, int32_t to) {
    const auto [found, is_new] =
        way_numbers_.try_emplace({kind, from, to}, static_cast<int32_t>(ways_.size()));
    if (is_new) ways_.push_back({.from = from, .to = to});
    return found->second;
  }

  void read_program(int32_t rank) {
    const Program& own = program(rank);
    for (int32_t index = 0; index < own.op_count(); ++index) {
      const Op& op = own.op(index);
      if (op.spec->group == nullptr) continue;
      const int32_t number = find_group(group_of(op), rank);
      if (number < 0) {
        refuse(fmt::format("rank {} has no such group for {}.", rank, describe(own, index)));
      }
      const std::optional<MessageUse> message = message_use(op);
      if (message) {
        read_message(rank, index, *message, groups_[static_cast<size_t>(number)].members);
      } else {
        Group& group = groups_[static_cast<size_t>(number)];
        group.operations[place_in(group, rank)].push_back(index);
        at(rank).events.push_back({index, number, Kind::collective});
      }
    }
  }

  void read_message(int32_t rank, int32_t index, const MessageUse& message,
                    const std::vector<int32_t>& members) {
    const int32_t place = message.way.peer;
    if (place < 0 || static_cast<size_t>(place) >= members.size() ||
        members[static_cast<size_t>(place)] == rank) {
      refuse(fmt::format("rank {} has no peer {} for {}.", rank, place,
                         describe(program(rank), index)));
    }
    const int32_t peer = members[static_cast<size_t>(place)];
    const bool receives = message.action == MessageUse::Action::receive;
    const int32_t number = receives ? find_way(message.way.group, peer, rank)
                                    : find_way(message.way.group, rank, peer);
    Way& way = ways_[static_cast<size_t>(number)];
    switch (message.action) {
      case MessageUse::Action::send:
        way.sends.push_back(index);
        at(rank).events.push_back({index, number, Kind::send});
        break;
      case MessageUse::Action::finish:
        way.finishes.push_back(index);
        at(rank).events.push_back({index, number, Kind::finish});
        break;
      case MessageUse::Action::receive:
        way.receives.push_back(index);
        at(rank).events.push_back({index, number, Kind::receive});
        break;
    }
  }

  void compare(const Group& group, int32_t first, int32_t rank) const {
    const Program& a = program(first);
    const Program& b = program(rank);
    const std::vector<int32_t>& expected = group.operations.front();
    const std::vector<int32_t>& found = group.operations[place_in(group, rank)];
    const size_t both = std::min(expected.size(), found.size());
    for (size_t i = 0; i < both; ++i) {
      const Op& x = a.op(expected[i]);
      const Op& y = b.op(found[i]);
      if (x.spec == y.spec && same_tensors(a, x, b, y)) continue;
      refuse(fmt::format("collective {} of rank {} is {}, of rank {} {}.", i, first,
                         describe(a, expected[i]), rank, describe(b, found[i])));
    }
    const auto refuse_missing = [&](int32_t without, int32_t with, int32_t index) {
      refuse(fmt::format("rank {} has no collective {}, which in rank {} is {}.", without, both,
                         with, describe(program(with), index)));
    };
    if (expected.size() > both) refuse_missing(rank, first, expected[both]);
    if (found.size() > both) refuse_missing(first, rank, found[both]);
  }

  // Sends are finished in their order, each with its own tensor.
  void check_ends(const Way& way) const {
    const Program& sender = program(way.from);
    for (size_t i = 0; i < std::max(way.sends.size(), way.finishes.size()); ++i) {
      if (i >= way.finishes.size()) {
        refuse(fmt::format("rank {} never finishes its send to rank {} in {}.", way.from, way.to,
                           describe(sender, way.sends[i])));
      }
      if (i < way.sends.size() && way.sends[i] < way.finishes[i] &&
          sender.inputs(sender.op(way.sends[i]))[0] ==
              sender.inputs(sender.op(way.finishes[i]))[0]) {
        continue;
      }
      refuse(fmt::format("rank {} finishes a send to rank {} that is not the next one, in {}.",
                         way.from, way.to, describe(sender, way.finishes[i])));
    }
  }

  // Takes the rank past its next event, and others past theirs that waited for it.
  bool advance(int32_t number, std::vector<int32_t>& ready) {
    Rank& rank = at(number);
    if (rank.next == rank.events.size()) return false;
    const Event& event = rank.events[rank.next];
    if (event.kind == Kind::collective) {
      return arrive(number, groups_[static_cast<size_t>(event.target)], ready);
    }
    Way& way = ways_[static_cast<size_t>(event.target)];
    int32_t served = -1;
    switch (event.kind) {
      case Kind::send:
        ++way.sent;
        served = way.to;
        break;
      case Kind::receive:
        rank.waits_for_peer = way.received == way.sent;
        if (rank.waits_for_peer) return false;
        ++way.received;
        served = way.from;
        break;
      default:
        rank.waits_for_peer = way.finished == way.received;
        if (rank.waits_for_peer) return false;
        ++way.finished;
        break;
    }
    ++rank.next;
    if (served >= 0 && at(served).waits_for_peer) {
      at(served).waits_for_peer = false;
      ready.push_back(served);
    }
    return true;
  }

  bool arrive(int32_t number, Group& group, std::vector<int32_t>& ready) {
    group.arrived.push_back(number);
    if (group.arrived.size() < group.members.size()) return false;
    for (const int32_t member : group.arrived) {
      ++at(member).next;
      if (member != number) ready.push_back(member);
    }
    group.arrived.clear();
    return true;
  }

  void refuse_waiting() const {
    std::string text;
    size_t waiting = 0;
    for (size_t number = 0; number < ranks_.size(); ++number) {
      const Rank& rank = ranks_[number];
      if (rank.next == rank.events.size()) continue;
      if (++waiting > kNamedRanks) continue;
      const Event& event = rank.events[rank.next];
      text += fmt::format("{}rank {} waits in {} for {}", text.empty() ? "" : "; ", number,
                          describe(*programs_[number], event.index), whom_it_waits_for(event));
    }
    if (waiting == 0) return;
    if (waiting > kNamedRanks) text += fmt::format("; and {} more", waiting - kNamedRanks);
    refuse(text + ".");
  }

  std::string whom_it_waits_for(const Event& event) const {
    if (event.kind != Kind::collective) {
      const Way& way = ways_[static_cast<size_t>(event.target)];
      return fmt::format("rank {}", event.kind == Kind::receive ? way.from : way.to);
    }
    const Group& group = groups_[static_cast<size_t>(event.target)];
    std::string text;
    size_t missing = 0;
    for (const int32_t member : group.members) {
      if (std::find(group.arrived.begin(), group.arrived.end(), member) != group.arrived.end()) {
        continue;
      }
      if (++missing <= kNamedRanks) {
        text += fmt::format("{}rank {}", text.empty() ? "" : ", ", member);
      }
    }
    if (missing > kNamedRanks) text += fmt::format(" and {} more", missing - kNamedRanks);
    return text;
  }

  std::span<const Program* const> programs_;
  const Layout& layout_;
  std::vector<Rank> ranks_;
  std::vector<Group> groups_;
  std::array<std::vector<int32_t>, kRankGroupCount> group_numbers_;  // by rank
  std::vector<Way> ways_;
  std::map<std::tuple<RankGroup, int32_t, int32_t>, int32_t> way_numbers_;
};

}  // namespace

void verify_collectives(std::span<const Program* const> programs, const Layout& layout) {
  Schedule schedule(programs, layout);
  schedule.check_collectives();
  schedule.check_messages();
  schedule.check_progress();
}

uint64_t hash_collectives(const Program& program) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  };
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec->group == nullptr) continue;
    add(fmt::format("{}@{}", op.spec->name, name_of(group_of(op))));
    if (const std::optional<MessageUse> message = message_use(op)) {
      add(fmt::format(":{}", message->way.peer));
    }
    add("(");
    for (const ValueId id : tensors_of(program, op)) {
      if (!id.valid()) {
        add("-,");
        continue;
      }
      const Value& value = program.value(id);
      add(fmt::format("{} {},", name_of(value.dtype), value.shape.to_string()));
    }
    add(")");
  }
  return hash;
}

}  // namespace troupe
