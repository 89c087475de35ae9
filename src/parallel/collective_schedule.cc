#include "parallel/collective_schedule.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "program/op_spec.h"

namespace troupe {
namespace {

// Of ranks in a message, before it goes on with their number.
constexpr size_t kNamedRanks = 16;

using Event = CollectiveTrace::Event;

RankGroup group_of(const Op& op) {
  return op.spec->group(op.attributes);
}

// What the operation hands over, or what it gets: what all ranks must have alike. State is, if
// nothing else takes part: where a rank keeps a shard of something, others may keep more of it. So
// are other shards left out.
std::vector<ValueId> tensors_of(const Program& program, const Op& op) {
  const auto is_kept = [&](ValueId id) {
    if (!id.valid()) return false;
    const Role role = program.value(id).role;
    return is_state(role) || role == Role::metric;
  };
  std::vector<ValueId> tensors;
  if (op.spec->gathers_shards) return {program.outputs(op).begin(), program.outputs(op).end()};
  for (const auto operands : {program.inputs(op), program.outputs(op)}) {
    std::remove_copy_if(operands.begin(), operands.end(), std::back_inserter(tensors), is_kept);
    if (!tensors.empty()) return tensors;
  }
  const auto operands = op.input_count > 0 ? program.inputs(op) : program.outputs(op);
  return {operands.begin(), operands.end()};
}

std::string describe(const Event& event) {
  std::string text = fmt::format("operation {} ({}", event.index, event.spec->name);
  if (event.place.layer >= 0) text += fmt::format(", layer {}", event.place.layer);
  if (event.place.micro_batch >= 0) {
    text += fmt::format(", micro-batch {}", event.place.micro_batch);
  }
  text += fmt::format(", group {}) of", name_of(event.group));
  for (const CollectiveTrace::Tensor& tensor : event.tensors) {
    if (!tensor.given) continue;
    text += fmt::format(" {} {} {}", tensor.name, name_of(tensor.dtype), tensor.shape.to_string());
  }
  return text;
}

[[noreturn]] void refuse(const std::string& difference) {
  throw UserError(ExitStatus::does_not_fit,
                  "The ranks' programs do not fit together and would deadlock: " + difference);
}

// One trace, sorted by the ranks that its events are for, as far as all ranks that share it agree:
// a use is a kind of group, or one direction of messages with one place in a kind of group.
struct SortedTrace {
  enum class Action : uint8_t { collective, sends, receives };
  struct Use {
    RankGroup group = RankGroup::world;
    Action action = Action::collective;
    int32_t peer = -1;
    int32_t first_event = 0;
    std::vector<int32_t> events = {};    // collectives, sends or receives
    std::vector<int32_t> finishes = {};  // of sends
  };

  explicit SortedTrace(const CollectiveTrace& trace) : events(trace.events) {
    use_of.reserve(events.size());
    for (size_t i = 0; i < events.size(); ++i) {
      const Event& event = events[i];
      Action action = Action::collective;
      int32_t peer = -1;
      bool finishes = false;
      if (event.message) {
        finishes = event.message->action == MessageUse::Action::finish;
        action =
            event.message->action == MessageUse::Action::receive ? Action::receives : Action::sends;
        peer = event.message->peer;
      }
      const auto number = static_cast<int32_t>(i);
      const auto [found, is_new] =
          numbers.try_emplace({event.group, action, peer}, static_cast<int32_t>(uses.size()));
      if (is_new) uses.push_back({event.group, action, peer, number});
      Use& use = uses[static_cast<size_t>(found->second)];
      (finishes ? use.finishes : use.events).push_back(number);
      use_of.push_back(found->second);
    }
  }

  // The collectives of one kind of group; null: there are none.
  const Use* find_collectives(RankGroup group) const {
    const auto found = numbers.find({group, Action::collective, -1});
    return found == numbers.end() ? nullptr : &uses[static_cast<size_t>(found->second)];
  }
  const Event& at(int32_t event) const { return events[static_cast<size_t>(event)]; }

  std::span<const Event> events;
  std::vector<Use> uses;
  std::vector<int32_t> use_of;  // by event
  std::map<std::tuple<RankGroup, Action, int32_t>, int32_t> numbers;
};

// The collectives and messages of all ranks, and which ranks they are for.
class Schedule {
 public:
  Schedule(std::span<const CollectiveTrace> traces, std::span<const int32_t> trace_of_rank,
           const Layout& layout)
      : trace_of_rank_(trace_of_rank), layout_(layout), ranks_(trace_of_rank.size()) {
    TROUPE_CHECK(trace_of_rank.size() == static_cast<size_t>(layout.world_size()),
                 "a program of each rank");
    traces_.reserve(traces.size());
    for (const CollectiveTrace& trace : traces) traces_.emplace_back(trace);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) find_targets(static_cast<int32_t>(rank));
  }

  void check_collectives() const {
    std::set<std::tuple<RankGroup, int32_t, int32_t>> compared;
    for (const Group& group : groups_) {
      const int32_t first = group.members.front();
      for (const int32_t rank : group.members) {
        const int32_t a = trace_number(first);
        const int32_t b = trace_number(rank);
        if (a != b && compared.insert({group.kind, a, b}).second) compare(group.kind, first, rank);
      }
    }
  }

  void check_messages() const {
    std::set<std::tuple<int32_t, int32_t, int32_t, int32_t>> compared;
    for (const Way& way : ways_) {
      if (compared.insert({trace_number(way.from), way.sends, trace_number(way.to), way.receives})
              .second) {
        compare_messages(way);
      }
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
  using Use = SortedTrace::Use;
  struct Rank {
    std::vector<int32_t> targets;  // by use: in groups_, or in ways_
    size_t next = 0;               // event
    bool waits_for_peer = false;   // in a message
  };
  struct Group {
    RankGroup kind = RankGroup::world;
    std::vector<int32_t> members;
    std::vector<int32_t> arrived = {};
  };
  // Messages from one rank to another.
  struct Way {
    int32_t from = 0;
    int32_t to = 0;
    int32_t sends = -1;     // a use of the sender; -1: it has none
    int32_t receives = -1;  // and of the receiver
    size_t sent = 0;
    size_t finished = 0;
    size_t received = 0;
  };

  Rank& at(int32_t rank) { return ranks_[static_cast<size_t>(rank)]; }
  int32_t trace_number(int32_t rank) const { return trace_of_rank_[static_cast<size_t>(rank)]; }
  const SortedTrace& trace(int32_t rank) const {
    return traces_[static_cast<size_t>(trace_number(rank))];
  }
  // Of the rank's use; nothing where it has none.
  std::span<const int32_t> events_of(int32_t rank, int32_t use) const {
    if (use < 0) return {};
    return trace(rank).uses[static_cast<size_t>(use)].events;
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
        groups_.push_back({kind, std::move(members)});
      }
    }
    return numbers[static_cast<size_t>(rank)];
  }

  void find_targets(int32_t rank) {
    const SortedTrace& own = trace(rank);
    for (size_t number = 0; number < own.uses.size(); ++number) {
      const Use& use = own.uses[number];
      const int32_t group = find_group(use.group, rank);
      if (group < 0) {
        refuse(fmt::format("rank {} has no such group for {}.", rank,
                           describe(own.at(use.first_event))));
      }
      at(rank).targets.push_back(use.action == SortedTrace::Action::collective
                                     ? group
                                     : find_way(rank, static_cast<int32_t>(number), group));
    }
  }

  int32_t find_way(int32_t rank, int32_t number, int32_t group) {
    const Use& use = trace(rank).uses[static_cast<size_t>(number)];
    const std::vector<int32_t>& members = groups_[static_cast<size_t>(group)].members;
    if (use.peer < 0 || static_cast<size_t>(use.peer) >= members.size() ||
        members[static_cast<size_t>(use.peer)] == rank) {
      refuse(fmt::format("rank {} has no peer {} for {}.", rank, use.peer,
                         describe(trace(rank).at(use.first_event))));
    }
    const int32_t peer = members[static_cast<size_t>(use.peer)];
    const bool receives = use.action == SortedTrace::Action::receives;
    const int32_t from = receives ? peer : rank;
    const int32_t to = receives ? rank : peer;
    const auto [found, is_new] =
        way_numbers_.try_emplace({use.group, from, to}, static_cast<int32_t>(ways_.size()));
    if (is_new) ways_.push_back({.from = from, .to = to});
    Way& way = ways_[static_cast<size_t>(found->second)];
    (receives ? way.receives : way.sends) = number;
    return found->second;
  }

  void compare(RankGroup kind, int32_t first, int32_t rank) const {
    const SortedTrace& a = trace(first);
    const SortedTrace& b = trace(rank);
    static const std::vector<int32_t> kNone;
    const Use* of_first = a.find_collectives(kind);
    const Use* of_rank = b.find_collectives(kind);
    const std::vector<int32_t>& expected = of_first != nullptr ? of_first->events : kNone;
    const std::vector<int32_t>& found = of_rank != nullptr ? of_rank->events : kNone;
    const size_t both = std::min(expected.size(), found.size());
    for (size_t i = 0; i < both; ++i) {
      const Event& x = a.at(expected[i]);
      const Event& y = b.at(found[i]);
      if (x.spec == y.spec && x.tensors == y.tensors) continue;
      refuse(fmt::format("collective {} of rank {} is {}, of rank {} {}.", i, first, describe(x),
                         rank, describe(y)));
    }
    const auto refuse_missing = [&](int32_t without, int32_t with, int32_t event) {
      refuse(fmt::format("rank {} has no collective {}, which in rank {} is {}.", without, both,
                         with, describe(trace(with).at(event))));
    };
    if (expected.size() > both) refuse_missing(rank, first, expected[both]);
    if (found.size() > both) refuse_missing(first, rank, found[both]);
  }

  void compare_messages(const Way& way) const {
    const SortedTrace& sender = trace(way.from);
    const SortedTrace& receiver = trace(way.to);
    const std::span<const int32_t> sends = events_of(way.from, way.sends);
    const std::span<const int32_t> receives = events_of(way.to, way.receives);
    const size_t both = std::min(sends.size(), receives.size());
    for (size_t i = 0; i < both; ++i) {
      const Event& send = sender.at(sends[i]);
      const Event& receive = receiver.at(receives[i]);
      if (send.tensors == receive.tensors) continue;
      refuse(fmt::format("message {} from rank {} is sent in {} and received by rank {} in {}.", i,
                         way.from, describe(send), way.to, describe(receive)));
    }
    if (sends.size() > both) {
      refuse(fmt::format("rank {} never receives message {} from rank {}, which is sent in {}.",
                         way.to, both, way.from, describe(sender.at(sends[both]))));
    }
    if (receives.size() > both) {
      refuse(fmt::format("rank {} never sends message {} to rank {}, which is received in {}.",
                         way.from, both, way.to, describe(receiver.at(receives[both]))));
    }
    check_ends(way);
  }

  // Sends are finished in their order, each with its own tensor.
  void check_ends(const Way& way) const {
    if (way.sends < 0) return;
    const SortedTrace& sender = trace(way.from);
    const Use& use = sender.uses[static_cast<size_t>(way.sends)];
    for (size_t i = 0; i < std::max(use.events.size(), use.finishes.size()); ++i) {
      if (i >= use.finishes.size()) {
        refuse(fmt::format("rank {} never finishes its send to rank {} in {}.", way.from, way.to,
                           describe(sender.at(use.events[i]))));
      }
      if (i < use.events.size() && use.events[i] < use.finishes[i] &&
          sender.at(use.events[i]).first == sender.at(use.finishes[i]).first) {
        continue;
      }
      refuse(fmt::format("rank {} finishes a send to rank {} that is not the next one, in {}.",
                         way.from, way.to, describe(sender.at(use.finishes[i]))));
    }
  }

  // In groups_, or in ways_.
  size_t target_of(int32_t number) const {
    const Rank& rank = ranks_[static_cast<size_t>(number)];
    const int32_t use = trace(number).use_of[rank.next];
    return static_cast<size_t>(rank.targets[static_cast<size_t>(use)]);
  }

  // Takes the rank past its next event, and others past theirs that waited for it.
  bool advance(int32_t number, std::vector<int32_t>& ready) {
    Rank& rank = at(number);
    const SortedTrace& own = trace(number);
    if (rank.next == own.events.size()) return false;
    const Event& event = own.events[rank.next];
    const size_t target = target_of(number);
    if (!event.message) return arrive(number, groups_[target], ready);
    Way& way = ways_[target];
    int32_t served = -1;
    switch (event.message->action) {
      case MessageUse::Action::send:
        ++way.sent;
        served = way.to;
        break;
      case MessageUse::Action::receive:
        rank.waits_for_peer = way.received == way.sent;
        if (rank.waits_for_peer) return false;
        ++way.received;
        served = way.from;
        break;
      case MessageUse::Action::finish:
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
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const auto number = static_cast<int32_t>(i);
      const SortedTrace& own = trace(number);
      if (ranks_[i].next == own.events.size()) continue;
      if (++waiting > kNamedRanks) continue;
      text += fmt::format("{}rank {} waits in {} for {}", text.empty() ? "" : "; ", number,
                          describe(own.events[ranks_[i].next]), whom_it_waits_for(number));
    }
    if (waiting == 0) return;
    if (waiting > kNamedRanks) text += fmt::format("; and {} more", waiting - kNamedRanks);
    refuse(text + ".");
  }

  std::string whom_it_waits_for(int32_t number) const {
    const Event& event = trace(number).events[ranks_[static_cast<size_t>(number)].next];
    const size_t target = target_of(number);
    if (event.message) {
      const bool receives = event.message->action == MessageUse::Action::receive;
      return fmt::format("rank {}", receives ? ways_[target].from : ways_[target].to);
    }
    const Group& group = groups_[target];
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

  std::span<const int32_t> trace_of_rank_;
  const Layout& layout_;
  std::vector<SortedTrace> traces_;
  std::vector<Rank> ranks_;
  std::vector<Group> groups_;
  std::array<std::vector<int32_t>, kRankGroupCount> group_numbers_;  // by rank
  std::vector<Way> ways_;
  std::map<std::tuple<RankGroup, int32_t, int32_t>, int32_t> way_numbers_;
};

}  // namespace

CollectiveTrace trace_collectives(const Program& program) {
  CollectiveTrace trace;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec->group == nullptr) continue;
    Event event{.index = index,
                .spec = op.spec,
                .place = op.place,
                .group = group_of(op),
                .message = message_use(op),
                .first = {},
                .tensors = {}};
    for (const ValueId id : tensors_of(program, op)) {
      if (!event.first.valid()) event.first = id;
      if (!id.valid()) {
        event.tensors.emplace_back();
        continue;
      }
      const Value& value = program.value(id);
      event.tensors.push_back(
          {.name = value.name, .dtype = value.dtype, .shape = value.shape, .given = true});
    }
    trace.events.push_back(std::move(event));
  }
  return trace;
}

void verify_collectives(std::span<const CollectiveTrace> traces,
                        std::span<const int32_t> trace_of_rank, const Layout& layout) {
  Schedule schedule(traces, trace_of_rank, layout);
  schedule.check_collectives();
  schedule.check_messages();
  schedule.check_progress();
}

void verify_collectives(std::span<const Program* const> programs, const Layout& layout) {
  std::vector<CollectiveTrace> traces;
  std::vector<int32_t> trace_of_rank;
  for (const Program* program : programs) {
    trace_of_rank.push_back(static_cast<int32_t>(traces.size()));
    traces.push_back(trace_collectives(*program));
  }
  verify_collectives(traces, trace_of_rank, layout);
}

uint64_t hash_collectives(const Program& program) {
  std::map<int32_t, size_t> messages;  // the number of each tensor that is sent or received
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  };
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec->group == nullptr) continue;
    add(fmt::format("{}@{}", op.spec->name, name_of(group_of(op))));
    if (const std::optional<MessageUse> message = message_use(op)) {
      const ValueId tensor = tensors_of(program, op).front();
      const size_t number = messages.try_emplace(tensor.index, messages.size()).first->second;
      add(fmt::format(":{}#{}", message->peer, number));
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
