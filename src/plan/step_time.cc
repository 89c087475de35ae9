#include "plan/step_time.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "plan/link_traffic.h"

namespace troupe {
namespace {

// How much of the time that an exchange over NVLink runs beside the compute queue is added to that:
// its kernels take multiprocessors and bandwidth.
constexpr double kContention = 1;

// The ranks with which a rank exchanges.
struct Members {
  std::vector<int32_t> ranks;
  double others = 0;
  double near = 0;              // of these, those that NVLink joins with the rank
  bool spans_pipeline = false;  // some are at other places of the pipeline
};

Members members_of(const Layout& layout, RankGroup kind, int32_t rank, const GpuCluster& cluster) {
  Members members;
  members.ranks = layout.members(kind, rank);
  const int32_t place = layout.dense_place(rank).pp;
  for (const int32_t other : members.ranks) {
    if (layout.dense_place(other).pp != place) members.spans_pipeline = true;
    if (other == rank) continue;
    members.others += 1;
    if (cluster.shares_nvlink(rank, other)) members.near += 1;
  }
  return members;
}

bool sends_rows(const Op& op) {
  const std::string_view kind = op.spec->name;
  return kind.find("_rows") != std::string_view::npos;
}

double seconds_of_links(const LinkTraffic& sent, const Members& members, const GpuModel& gpu,
                        double nvlink_share) {
  const double others = members.others;
  const double near = members.near;
  const double rounds = sent.messages / others;
  const double by_nvlink = sent.bytes * near / others / (gpu.nvlink_bandwidth * nvlink_share);
  const double by_network = sent.bytes * (others - near) / others / gpu.network_bandwidth;
  return std::max(by_nvlink, by_network) +
         rounds * (near < others ? gpu.network_latency : gpu.nvlink_latency);
}

double seconds_of_message(double bytes, int32_t rank, int32_t peer, const GpuCluster& cluster) {
  const GpuModel& gpu = cluster.model;
  return cluster.shares_nvlink(rank, peer) ? bytes / gpu.nvlink_bandwidth + gpu.nvlink_latency
                                           : bytes / gpu.network_bandwidth + gpu.network_latency;
}

// How many times as much is sent where the fullest rank gets `load` times the mean.
double traffic_of(const LinkTraffic& sent, double load) {
  if (sent.most_bytes <= sent.bytes) return 1;
  return std::min(load, sent.most_bytes / sent.bytes);
}

struct Interval {
  double begin = 0;
  double transfer = 0;  // until then it waits for other ranks
  double end = 0;
  Queue queue = Queue::communication;
  RankGroup group = RankGroup::world;
};

struct Span {
  double begin = 0;
  double end = 0;
};

// Seconds of `span` in which one of `others` runs too.
double seconds_beside(const Span& span, const std::vector<Span>& others) {
  double seconds = 0;
  for (auto other = others.rbegin(); other != others.rend() && other->end > span.begin; ++other) {
    seconds += std::max(0.0, std::min(span.end, other->end) - std::max(span.begin, other->begin));
  }
  return seconds;
}

// One rank that is carried out. Its operations are begun in the order of the program, which is that
// of every queue and of all events.
struct Rank {
  const TimedProgram* program = nullptr;
  size_t next = 0;
  size_t next_event = 0;
  std::vector<double> begun;
  std::vector<double> ended;
  std::array<double, kQueueCount> free{};
  std::map<RankGroup, size_t> collectives;  // that span the pipeline and were arrived at
  std::vector<Interval> other_queues;
  // Of operations that slow each other down: of the compute queue, and exchanges over NVLink. In
  // the order of their queues, which is that of time.
  std::vector<Span> computing;
  std::vector<Span> contending;
  // Collectives of other queues than compute, by link and queue.
  std::array<std::array<std::vector<Span>, kQueueCount>, kLinkCount> moving;
  size_t last_computed = 0;  // the operation that gave the last one of `computing`
};

struct Gathering {
  size_t arrived = 0;
  double last = 0;
};

class Simulator {
 public:
  Simulator(std::span<const TimedProgram* const> programs, double launch_seconds)
      : launch_(launch_seconds) {
    for (const TimedProgram* program : programs) {
      ranks_.emplace_back().program = program;
      ranks_.back().ended.resize(program->operations.size());
    }
  }

  StepTime run() {
    bool all_done = false;
    while (!all_done) {
      all_done = true;
      bool any = false;
      for (size_t i = 0; i < ranks_.size(); ++i) {
        while (ranks_[i].next < ranks_[i].ended.size() && try_next(i)) any = true;
        all_done = all_done && ranks_[i].next == ranks_[i].ended.size();
      }
      TROUPE_CHECK(all_done || any, "a step without deadlock");
    }
    for (const Rank& rank : ranks_) {
      for (const double free : rank.free) time_.seconds = std::max(time_.seconds, free);
    }
    for (const Rank& rank : ranks_) add_parts(rank);
    const auto count = static_cast<double>(ranks_.size());
    for (double& part : time_.compute) part /= count;
    for (double& part : time_.exposed) part /= count;
    time_.bubble /= count;
    time_.copies /= count;
    time_.idle /= count;
    return time_;
  }

 private:
  // When the queue and the events let the rank's next operation begin.
  double earliest(Rank& rank) const {
    const auto index = static_cast<int32_t>(rank.next);
    double begin = rank.free[static_cast<size_t>(rank.program->operations[rank.next].queue)];
    if (rank.program->is_serial) begin = *std::max_element(rank.free.begin(), rank.free.end());
    const std::vector<QueueEvent>& events = rank.program->events;
    for (size_t e = rank.next_event; e < events.size() && events[e].after == index; ++e) {
      begin = std::max(begin, rank.ended[static_cast<size_t>(events[e].before)]);
    }
    return begin;
  }

  // Carries the next operation out, unless other ranks must come first.
  bool try_next(size_t i) {
    Rank& rank = ranks_[i];
    const TimedOperation& op = rank.program->operations[rank.next];
    const double begin = earliest(rank);
    double transfer = begin;
    double end = begin + op.seconds;
    if (op.peer >= 0) {
      const auto place = rank.program->place;
      if (op.action == MessageUse::Action::send) {
        posted_[{place, op.peer}].push_back({begin, op.seconds});
        end = begin;
      } else if (op.action == MessageUse::Action::receive) {
        auto& posted = posted_[{op.peer, place}];
        if (posted.empty()) return false;
        transfer = std::max(begin, posted.front().first);
        end = transfer + posted.front().second;
        posted.pop_front();
        received_[{op.peer, place}].push_back(end);
      } else {
        auto& received = received_[{place, op.peer}];
        if (received.empty()) return false;
        transfer = end = std::max(begin, received.front());
        received.pop_front();
      }
    } else if (op.spans_pipeline) {
      const size_t number = rank.collectives[op.group];
      Gathering& all = gatherings_[{op.group, number}];
      if (!arrived_[{op.group, number}][i]) {
        arrived_[{op.group, number}][i] = true;
        ++all.arrived;
        all.last = std::max(all.last, begin);
      }
      if (all.arrived < members(op.group)) return false;
      ++rank.collectives[op.group];
      transfer = std::max(begin, all.last);
      end = transfer + op.seconds;
    }
    finish(rank, op, {begin, transfer, end, op.queue, op.group});
    return true;
  }

  // Of two operations that slow each other down, the one that is looked at later delays the compute
  // queue.
  double delay_of(Rank& rank, const TimedOperation& op, const Span& span) {
    if (op.queue == Queue::compute ? op.leaves_room : op.link != Link::nvlink) return 0;
    const bool computes = op.queue == Queue::compute;
    (computes ? rank.computing : rank.contending).push_back(span);
    return kContention * seconds_beside(span, computes ? rank.contending : rank.computing);
  }

  // How long a collective waits for those of other queues that take the same link.
  static double turns_of_others(Rank& rank, const TimedOperation& op, const Span& span) {
    if (op.queue == Queue::compute || op.link == Link::none) return 0;
    auto& moving = rank.moving[static_cast<size_t>(op.link)];
    double seconds = 0;
    for (size_t queue = 0; queue < moving.size(); ++queue) {
      if (queue != static_cast<size_t>(op.queue)) seconds += seconds_beside(span, moving[queue]);
    }
    moving[static_cast<size_t>(op.queue)].push_back({span.begin, span.end + seconds});
    return seconds;
  }

  void finish(Rank& rank, const TimedOperation& op, Interval interval) {
    interval.end += turns_of_others(rank, op, {interval.transfer, interval.end});
    const double delay = delay_of(rank, op, {interval.transfer, interval.end});
    if (op.queue == Queue::compute) {
      interval.end += delay;
      rank.last_computed = rank.next;
    } else if (delay > 0) {
      rank.ended[rank.last_computed] += delay;
      rank.free[static_cast<size_t>(Queue::compute)] += delay;
    }
    rank.ended[rank.next] = interval.end;
    rank.free[static_cast<size_t>(op.queue)] = interval.end + launch_;
    const std::vector<QueueEvent>& events = rank.program->events;
    while (rank.next_event < events.size() &&
           events[rank.next_event].after == static_cast<int32_t>(rank.next)) {
      ++rank.next_event;
    }
    ++rank.next;
    if (op.queue != Queue::compute) rank.other_queues.push_back(interval);
    rank.begun.push_back(interval.begin);
  }

  // Places whose programs have collectives of the group that span the pipeline.
  size_t members(RankGroup group) {
    const auto found = members_.find(group);
    if (found != members_.end()) return found->second;
    size_t count = 0;
    for (const Rank& rank : ranks_) {
      count += std::any_of(
                   rank.program->operations.begin(), rank.program->operations.end(),
                   [&](const TimedOperation& op) { return op.spans_pipeline && op.group == group; })
                   ? 1
                   : 0;
    }
    return members_[group] = count;
  }

  // What the compute queue does, and what there is in its gaps.
  void add_parts(const Rank& rank) {
    const std::vector<double>& begun = rank.begun;
    std::vector<Interval> others = rank.other_queues;
    std::sort(others.begin(), others.end(),
              [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
    size_t first = 0;
    double at = 0;
    const auto gap = [&](double begin, double end) {
      while (first < others.size() && others[first].end <= begin) ++first;
      for (size_t i = first; i < others.size() && others[i].begin < end && begin < end; ++i) {
        const Interval& other = others[i];
        if (other.end <= begin) continue;
        time_.idle += std::max(0.0, other.begin - begin);
        begin = std::max(begin, other.begin);
        const double waits = std::clamp(other.transfer, begin, end) - begin;
        time_.bubble += waits;
        begin += waits;
        const double moves = std::clamp(other.end, begin, end) - begin;
        if (other.queue == Queue::copy) {
          time_.copies += moves;
        } else {
          time_.exposed[static_cast<size_t>(other.group)] += moves;
        }
        begin += moves;
      }
      time_.idle += std::max(0.0, end - begin);
    };
    for (size_t i = 0; i < begun.size(); ++i) {
      const TimedOperation& op = rank.program->operations[i];
      if (op.queue != Queue::compute) continue;
      gap(at, begun[i]);
      at = rank.ended[i];
      time_.compute[static_cast<size_t>(op.part)] += at - begun[i];
    }
    gap(at, time_.seconds);
  }

  using Way = std::pair<int32_t, int32_t>;
  using Number = std::pair<RankGroup, size_t>;

  double launch_ = 0;
  std::vector<Rank> ranks_;
  std::map<Way, std::deque<std::pair<double, double>>> posted_;  // when, and how long it travels
  std::map<Way, std::deque<double>> received_;
  std::map<Number, Gathering> gatherings_;
  std::map<Number, std::map<size_t, bool>> arrived_;
  std::map<RankGroup, size_t> members_;
  StepTime time_;
};

}  // namespace

double TimedProgram::seconds() const {
  double sum = 0;
  for (const TimedOperation& op : operations) {
    if (op.queue == Queue::compute) sum += op.seconds;
  }
  return sum;
}

TimedProgram time_program(const Program& program, const MemoryPlan& memory,
                          const GpuCluster& cluster, const Layout& layout, int32_t rank) {
  TimedProgram timed;
  timed.place = layout.dense_place(rank).pp;
  timed.events = find_queue_events(program, memory);
  const auto load = [&](int32_t layer) { return cluster.expert_load.of(layer, layout.ep()); };
  const Program expected = program.with_expected_rows(load);
  std::array<Members, kRankGroupCount> members;
  for (size_t i = 0; i < members.size(); ++i) {
    members[i] = members_of(layout, static_cast<RankGroup>(i), rank, cluster);
  }
  timed.is_serial = cluster.model.traits.compute_capability == kNoGpu;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = expected.op(index);
    TimedOperation each{.queue = op.place.queue, .part = part_of(op)};
    if (op.spec->group == nullptr) {
      each.seconds = seconds_of(program, expected, index, cluster.model);
      each.leaves_room = leaves_multiprocessors({program, program.op(index)}, cluster.model.traits);
    } else {
      each.group = op.spec->group(op.attributes);
      const Members& group = members[static_cast<size_t>(each.group)];
      const auto ranks = static_cast<int32_t>(group.ranks.size());
      LinkTraffic sent = link_traffic(OpView{expected, op}, ranks);
      const double traffic = traffic_of(sent, load(op.place.layer));
      sent.bytes *= traffic;
      each.seconds = seconds_of(program, expected, index, cluster.model, traffic);
      if (const auto use = message_use(op)) {
        const int32_t peer = group.ranks[static_cast<size_t>(use->peer)];
        each.peer = layout.dense_place(peer).pp;
        each.action = use->action;
        each.seconds = seconds_of_message(sent.bytes, rank, peer, cluster);
      } else if (ranks > 1) {
        const double share = sends_rows(op) ? kShareOfRows : kShareOfCollectives;
        each.seconds = std::max(each.seconds, seconds_of_links(sent, group, cluster.model, share));
        each.spans_pipeline = group.spans_pipeline;
        if (!timed.is_serial) {
          each.link = group.near == group.others ? Link::nvlink : Link::network;
        }
      }
    }
    timed.operations.push_back(each);
  }
  return timed;
}

std::map<std::string_view, double> seconds_of_kinds(const Program& program,
                                                    const TimedProgram& timed) {
  std::map<std::string_view, double> seconds;
  for (int32_t i = 0; i < program.op_count(); ++i) {
    seconds[program.op(i).spec->name] += timed.operations[static_cast<size_t>(i)].seconds;
  }
  return seconds;
}

double StepTime::exposed_seconds() const {
  return std::accumulate(exposed.begin(), exposed.end(), 0.0) +
         compute[static_cast<size_t>(TimePart::exchange)];
}

double StepTime::products() const {
  return compute[static_cast<size_t>(TimePart::dense_products)] +
         compute[static_cast<size_t>(TimePart::expert_products)] +
         compute[static_cast<size_t>(TimePart::attention)];
}

double StepTime::memory() const {
  return compute[static_cast<size_t>(TimePart::memory_bound)] +
         compute[static_cast<size_t>(TimePart::update)];
}

std::string_view limit_of(const StepTime& time) {
  const std::array<std::pair<std::string_view, double>, 5> limits = {
      {{"compute", time.products()},
       {"memory bandwidth", time.memory()},
       {"communication", time.exposed_seconds()},
       {"pipeline", time.bubble},
       {"host", time.copies + time.idle}}};
  return std::max_element(limits.begin(), limits.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

StepTime simulate_step(std::span<const TimedProgram* const> programs, double launch_seconds) {
  return Simulator(programs, launch_seconds).run();
}

StepTime simulate_slowest(std::span<const TimedProgram* const> programs, int32_t places,
                          double launch_seconds) {
  std::vector<const TimedProgram*> slowest(static_cast<size_t>(places), nullptr);
  for (const TimedProgram* program : programs) {
    const TimedProgram*& of_place = slowest[static_cast<size_t>(program->place)];
    if (of_place == nullptr || of_place->seconds() < program->seconds()) of_place = program;
  }
  return simulate_step(slowest, launch_seconds);
}

double seconds_alone(TimedProgram program, double launch_seconds) {
  for (TimedOperation& op : program.operations) {
    op.peer = -1;
    op.spans_pipeline = false;
  }
  const TimedProgram* const alone = &program;
  return simulate_step({&alone, 1}, launch_seconds).seconds;
}

}  // namespace troupe
