#include "parallel/pipeline_schedule.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/error.h"

namespace troupe {
namespace {

using Action = PipelineAction;
using Order = std::vector<PipelineStep>;

int32_t stage_of(const PipelineShape& shape, int32_t rank, int32_t chunk) {
  return stage_at(shape.placement(), shape.ranks, {rank, chunk});
}

// A backward, of one piece with the forward before it if `paired`.
PipelineStep backward_step(int32_t micro_batch, int32_t chunk, bool paired) {
  return {Action::backward, micro_batch, chunk, /*peer=*/-1, paired};
}

// One chunk per rank: pp - r - 1 forwards to fill the pipeline, then one forward and one backward,
// then the backwards that are left. Merged, what a pair makes is at the next rank when the pair is
// done: the way of a micro-batch to the end and back takes twice as many pieces.
Order order_1f1b(const PipelineShape& shape, int32_t rank) {
  const int32_t behind = shape.ranks - rank - 1;
  const int32_t warm_up = std::min(shape.merged ? 2 * behind + 1 : behind, shape.micro_batches);
  Order order;
  for (int32_t i = 0; i < shape.micro_batches + warm_up; ++i) {
    const bool forward = i < shape.micro_batches;
    if (forward) order.push_back({Action::forward, i, 0});
    if (i < warm_up) continue;
    order.push_back(backward_step(i - warm_up, 0, shape.merged && forward));
  }
  return order;
}

// The order in which forwards take (micro-batch, chunk): group by group, in a group chunk by chunk.
std::vector<std::pair<int32_t, int32_t>> interleaving(const PipelineShape& shape) {
  std::vector<std::pair<int32_t, int32_t>> virtual_batches;
  for (int32_t first = 0; first < shape.micro_batches; first += shape.group()) {
    const int32_t end = std::min(first + shape.group(), shape.micro_batches);
    for (int32_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (int32_t i = first; i < end; ++i) virtual_batches.emplace_back(i, chunk);
    }
  }
  return virtual_batches;
}

Order order_interleaved(const PipelineShape& shape, int32_t rank) {
  const auto batches = interleaving(shape);
  const size_t count = batches.size();
  // Merged: one more, so that the backward of a pair does not need its forward.
  const auto full = static_cast<size_t>(2 * (shape.ranks - rank - 1)) +
                    static_cast<size_t>(shape.chunks - 1) * static_cast<size_t>(shape.group()) +
                    (shape.merged ? 1 : 0);
  const size_t warm_up = std::min(full, count);
  Order order;
  for (size_t i = 0; i < count + warm_up; ++i) {
    if (i < count) order.push_back({Action::forward, batches[i].first, batches[i].second});
    if (i < warm_up) continue;
    const auto [micro_batch, chunk] = batches[i - warm_up];
    order.push_back(
        backward_step(micro_batch, shape.chunks - 1 - chunk, shape.merged && i < count));
  }
  return order;
}

// 1f1b with one forward more in flight, whose place is paid for by the weight gradients: rank r
// puts them off by r micro-batches, so every rank holds pp of them at most.
Order order_zb_h1(const PipelineShape& shape, int32_t rank) {
  const int32_t count = shape.micro_batches;
  const int32_t warm_up = std::min(shape.ranks - rank, count);
  Order order;
  for (int32_t i = 0; i < warm_up; ++i) order.push_back({Action::forward, i, 0});
  for (int32_t i = 0; i < count; ++i) {
    order.push_back({Action::data_gradient, i, 0});
    if (i >= rank) order.push_back({Action::weight_gradient, i - rank, 0});
    if (i + warm_up < count) order.push_back({Action::forward, i + warm_up, 0});
  }
  for (int32_t i = std::max(0, count - rank); i < count; ++i) {
    order.push_back({Action::weight_gradient, i, 0});
  }
  return order;
}

// zb-v by simulating all ranks step by step, each step of the same length.
class GreedyV {
 public:
  explicit GreedyV(const PipelineShape& shape)
      : shape_(shape), ranks_(static_cast<size_t>(shape.ranks)) {}

  std::vector<Order> run() {
    const auto steps = 6 * static_cast<size_t>(shape_.micro_batches);
    while (!std::all_of(ranks_.begin(), ranks_.end(),
                        [&](const Rank& rank) { return rank.order.size() == steps; })) {
      std::vector<std::optional<PipelineStep>> choices;
      for (int32_t rank = 0; rank < shape_.ranks; ++rank) choices.push_back(choose(rank));
      // All ranks choose by what was finished before this step.
      bool progress = false;
      for (size_t rank = 0; rank < choices.size(); ++rank) {
        if (!choices[rank]) continue;
        take(ranks_[rank], *choices[rank]);
        progress = true;
      }
      TROUPE_CHECK(progress, "the last place is kept for a second chunk, so some rank can go on");
    }
    std::vector<Order> orders;
    for (Rank& rank : ranks_) orders.push_back(std::move(rank.order));
    return orders;
  }

 private:
  struct Rank {
    Order order;
    int32_t forwards[2] = {0, 0};
    int32_t data_gradients[2] = {0, 0};
    std::deque<PipelineStep> waiting;  // weight gradients
    int32_t live = 0;
  };

  // How many micro-batches the stage has finished.
  int32_t forwards(int32_t stage) const {
    const StagePlace place = place_of_stage(StagePlacement::v, shape_.ranks, stage);
    return ranks_[static_cast<size_t>(place.rank)].forwards[place.chunk];
  }
  int32_t data_gradients(int32_t stage) const {
    const StagePlace place = place_of_stage(StagePlacement::v, shape_.ranks, stage);
    return ranks_[static_cast<size_t>(place.rank)].data_gradients[place.chunk];
  }

  std::optional<PipelineStep> choose(int32_t index) const {
    const Rank& rank = ranks_[static_cast<size_t>(index)];
    const int32_t last = shape_.stages() - 1;
    std::optional<PipelineStep> best;
    const auto consider = [&](PipelineStep step) {
      if (!best || step.micro_batch < best->micro_batch) best = step;
    };
    for (int32_t chunk = 0; chunk < 2; ++chunk) {
      const int32_t stage = stage_of(shape_, index, chunk);
      const int32_t next = rank.data_gradients[chunk];
      if (next < rank.forwards[chunk] && (stage == last || data_gradients(stage + 1) > next)) {
        consider({Action::data_gradient, next, chunk});
      }
    }
    if (best) return best;
    for (const int32_t chunk : {1, 0}) {
      const int32_t stage = stage_of(shape_, index, chunk);
      const int32_t next = rank.forwards[chunk];
      // As many as 1f1b holds, counted in chunks; the last place is the second chunk's, or ranks
      // full of first chunks would wait for each other.
      const bool room = rank.live < 2 * shape_.ranks - (chunk == 0 ? 1 : 0);
      if (room && next < shape_.micro_batches && (stage == 0 || forwards(stage - 1) > next)) {
        consider({Action::forward, next, chunk});
      }
    }
    if (best) return best;
    if (!rank.waiting.empty()) return rank.waiting.front();
    return std::nullopt;
  }

  static void take(Rank& rank, const PipelineStep& step) {
    rank.order.push_back(step);
    switch (step.action) {
      case Action::forward:
        ++rank.forwards[step.chunk];
        ++rank.live;
        break;
      case Action::data_gradient:
        ++rank.data_gradients[step.chunk];
        rank.waiting.push_back({Action::weight_gradient, step.micro_batch, step.chunk});
        break;
      default:
        rank.waiting.pop_front();
        --rank.live;
    }
  }

  PipelineShape shape_;
  std::vector<Rank> ranks_;
};

std::vector<Order> computing_orders(const PipelineShape& shape) {
  if (shape.schedule == PipelineSchedule::zb_v) return GreedyV(shape).run();
  std::vector<Order> orders;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    if (shape.schedule == PipelineSchedule::zb_h1) {
      orders.push_back(order_zb_h1(shape, rank));
    } else if (shape.chunks > 1) {
      orders.push_back(order_interleaved(shape, rank));
    } else {
      orders.push_back(order_1f1b(shape, rank));
    }
  }
  return orders;
}

// What a message carries: which micro-batch, and the stage whose input (activation) or output
// (gradient) it is.
struct Message {
  bool gradient = false;
  int32_t micro_batch = 0;
  int32_t stage = 0;  // the receiving stage
  auto operator<=>(const Message&) const = default;
};

bool makes_gradient(Action action) {
  return action == Action::backward || action == Action::data_gradient;
}

// The stage before or after `stage` of which this action needs the result, or -1.
int32_t needed_stage(const PipelineShape& shape, Action action, int32_t stage) {
  if (action == Action::forward) return stage - 1;
  return makes_gradient(action) && stage + 1 < shape.stages() ? stage + 1 : -1;
}

// The stage that needs the result of this action, or -1.
int32_t needing_stage(const PipelineShape& shape, Action action, int32_t stage) {
  if (action == Action::forward) return stage + 1 < shape.stages() ? stage + 1 : -1;
  return makes_gradient(action) ? stage - 1 : -1;
}

int32_t rank_of_stage(const PipelineShape& shape, int32_t stage) {
  return place_of_stage(shape.placement(), shape.ranks, stage).rank;
}

// The messages on their way, by sender and receiver.
template <class Item>
using Channels = std::map<std::pair<int32_t, int32_t>, std::deque<Item>>;

// Adds sends right after what makes the data, and receives right before what needs it; merged
// steps receive and send together. What was sent earlier on the same way is received first.
class MessageAdder {
 public:
  MessageAdder(PipelineTable& table, const std::vector<Order>& orders)
      : shape_(table.shape), table_(table) {
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
      for (const PipelineStep& step : orders[static_cast<size_t>(rank)]) {
        const int32_t next = needing_stage(shape_, step.action, stage_of(shape_, rank, step.chunk));
        if (next < 0 || rank_of_stage(shape_, next) == rank) continue;
        channels_[{rank, rank_of_stage(shape_, next)}].push_back(
            {makes_gradient(step.action), step.micro_batch, next});
      }
    }
  }

  void add(int32_t rank, const Order& order) {
    table_.ranks.emplace_back();
    received_.clear();
    for (size_t first = 0; first < order.size();) {
      const bool pair = first + 1 < order.size() && order[first + 1].merged;
      const auto piece = std::span(order).subspan(first, pair ? 2 : 1);
      for (const PipelineStep& step : piece) receive_for(rank, step);
      for (const PipelineStep& step : piece) table_.ranks.back().push_back(step);
      for (const PipelineStep& step : piece) send_from(rank, step);
      first += piece.size();
    }
  }

 private:
  void receive_for(int32_t rank, const PipelineStep& step) {
    const int32_t stage = stage_of(shape_, rank, step.chunk);
    const int32_t from = needed_stage(shape_, step.action, stage);
    if (from < 0 || rank_of_stage(shape_, from) == rank) return;
    const int32_t peer = rank_of_stage(shape_, from);
    std::deque<Message>& channel = channels_[{peer, rank}];
    while (!received_.contains({makes_gradient(step.action), step.micro_batch, stage})) {
      TROUPE_CHECK(!channel.empty(), "somebody sends what a stage needs");
      const Message& message = channel.front();
      const StagePlace place = place_of_stage(shape_.placement(), shape_.ranks, message.stage);
      table_.ranks.back().push_back(
          {message.gradient ? Action::receive_gradient : Action::receive_activation,
           message.micro_batch, place.chunk, peer});
      received_.insert(message);
      channel.pop_front();
    }
  }

  void send_from(int32_t rank, const PipelineStep& step) {
    const int32_t next = needing_stage(shape_, step.action, stage_of(shape_, rank, step.chunk));
    if (next < 0 || rank_of_stage(shape_, next) == rank) return;
    const bool gradient = makes_gradient(step.action);
    table_.ranks.back().push_back({gradient ? Action::send_gradient : Action::send_activation,
                                   step.micro_batch, step.chunk, rank_of_stage(shape_, next)});
  }

  const PipelineShape& shape_;
  PipelineTable& table_;
  Channels<Message> channels_;
  std::set<Message> received_;  // by the rank whose turn it is
};

std::string describe(const PipelineStep& step, int32_t rank) {
  constexpr std::string_view kNames[] = {
      "forward",          "backward",           "data gradient",
      "weight gradient",  "receive activation", "send activation",
      "receive gradient", "send gradient"};
  std::string text =
      fmt::format("rank {}: {} of micro-batch {}, chunk {}", rank,
                  kNames[static_cast<size_t>(step.action)], step.micro_batch, step.chunk);
  if (!is_compute(step.action)) {
    const bool sends =
        step.action == Action::send_activation || step.action == Action::send_gradient;
    text += fmt::format(" {} rank {}", sends ? "to" : "from", step.peer);
  }
  return text;
}

// Carries a table out, every rank as far as it can go, and notes what is wrong with it.
class Execution {
 public:
  Execution(const PipelineTable& table, const std::vector<StageCost>& costs, double message)
      : table_(table),
        shape_(table.shape),
        costs_(costs),
        message_(message),
        ranks_(table.ranks.size()),
        done_(static_cast<size_t>(shape_.micro_batches) * static_cast<size_t>(shape_.stages())) {}

  // The first fault, or nothing.
  std::string run() {
    timeline_.ranks.resize(ranks_.size());
    bool progress = true;
    while (progress && fault_.empty()) {
      progress = false;
      for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
        while (fault_.empty() && advance(rank)) progress = true;
      }
    }
    if (fault_.empty()) find_what_is_left();
    return fault_;
  }

  PipelineTimeline timeline() {
    double busy = 0;
    for (const auto& steps : timeline_.ranks) {
      for (const TimedStep& step : steps) {
        busy += step.end - step.begin;
        timeline_.makespan = std::max(timeline_.makespan, step.end);
      }
    }
    const double all = timeline_.makespan * shape_.ranks;
    timeline_.bubble = all > 0 ? 1 - busy / all : 0;
    return std::move(timeline_);
  }

 private:
  struct Rank {
    size_t next = 0;
    double clock = 0;
    std::set<Message> received;
  };
  struct Sent {
    Message message;
    double arrival = 0;
  };
  struct Done {
    bool forward = false;
    bool data_gradient = false;
    bool weight_gradient = false;
  };

  Done& done(int32_t micro_batch, int32_t stage) {
    return done_[static_cast<size_t>(micro_batch) * static_cast<size_t>(shape_.stages()) +
                 static_cast<size_t>(stage)];
  }

  // Carries out the rank's next step; false when there is none or it has to wait.
  bool advance(int32_t index) {
    Rank& rank = ranks_[static_cast<size_t>(index)];
    const auto& steps = table_.ranks[static_cast<size_t>(index)];
    if (rank.next == steps.size()) return false;
    const PipelineStep& step = steps[rank.next];
    if (step.micro_batch < 0 || step.micro_batch >= shape_.micro_batches || step.chunk < 0 ||
        step.chunk >= shape_.chunks || (!is_compute(step.action) && !is_peer(step.peer, index))) {
      fault_ = describe(step, index) + ": there is no such thing.";
      return false;
    }
    if (is_compute(step.action)) {
      compute(index, step);
    } else if (step.action == Action::send_activation || step.action == Action::send_gradient) {
      send(index, step);
    } else if (!receive(index, step)) {
      return false;
    }
    ++rank.next;
    return fault_.empty();
  }

  bool is_peer(int32_t peer, int32_t rank) const {
    return peer >= 0 && peer < shape_.ranks && peer != rank;
  }

  void compute(int32_t index, const PipelineStep& step) {
    Rank& rank = ranks_[static_cast<size_t>(index)];
    const int32_t stage = stage_of(shape_, index, step.chunk);
    Done& own = done(step.micro_batch, stage);
    const auto refuse = [&](std::string_view problem) {
      fault_ = fmt::format("{}: {}.", describe(step, index), problem);
    };
    const bool makes = makes_gradient(step.action);
    if (step.action == Action::forward) {
      if (own.forward) return refuse("it is done twice");
      own.forward = true;
    } else if (makes) {
      if (!own.forward) return refuse("it comes before the forward");
      if (own.data_gradient) return refuse("it is done twice");
      own.data_gradient = true;
      if (step.action == Action::backward) own.weight_gradient = true;
    } else {
      if (!own.data_gradient) return refuse("it comes before the data gradient");
      if (own.weight_gradient) return refuse("it is done twice");
      own.weight_gradient = true;
    }
    const int32_t from = needed_stage(shape_, step.action, stage);
    if (from >= 0) {
      const bool there = rank_of_stage(shape_, from) == index
                             ? (makes ? done(step.micro_batch, from).data_gradient
                                      : done(step.micro_batch, from).forward)
                             : rank.received.contains({makes, step.micro_batch, stage});
      if (!there) return refuse("what it needs has not been received");
    }
    const double begin = rank.clock;
    rank.clock += duration(step.action, stage);
    timeline_.ranks[static_cast<size_t>(index)].push_back({step, begin, rank.clock});
  }

  double duration(Action action, int32_t stage) const {
    const StageCost& cost = costs_[costs_.size() == 1 ? 0 : static_cast<size_t>(stage)];
    switch (action) {
      case Action::forward:
        return cost.forward;
      case Action::backward:
        return cost.data_gradient + cost.weight_gradient;
      case Action::data_gradient:
        return cost.data_gradient;
      default:
        return cost.weight_gradient;
    }
  }

  void send(int32_t index, const PipelineStep& step) {
    const bool gradient = step.action == Action::send_gradient;
    const int32_t stage = stage_of(shape_, index, step.chunk);
    const Done& own = done(step.micro_batch, stage);
    const int32_t target = gradient ? stage - 1 : stage + 1;
    if (!(gradient ? own.data_gradient : own.forward) || target < 0 || target >= shape_.stages() ||
        rank_of_stage(shape_, target) != step.peer) {
      fault_ = describe(step, index) + ": it has not been computed, or belongs elsewhere.";
      return;
    }
    channels_[{index, step.peer}].push_back({{gradient, step.micro_batch, target},
                                             ranks_[static_cast<size_t>(index)].clock + message_});
  }

  bool receive(int32_t index, const PipelineStep& step) {
    Rank& rank = ranks_[static_cast<size_t>(index)];
    std::deque<Sent>& channel = channels_[{step.peer, index}];
    if (channel.empty()) return false;
    const Message wanted{step.action == Action::receive_gradient, step.micro_batch,
                         stage_of(shape_, index, step.chunk)};
    const Sent& sent = channel.front();
    if (sent.message != wanted) {
      fault_ = fmt::format("{}: the next message on this way is {} of micro-batch {} for stage {}.",
                           describe(step, index),
                           sent.message.gradient ? "the gradient" : "the activation",
                           sent.message.micro_batch, sent.message.stage);
      return false;
    }
    rank.clock = std::max(rank.clock, sent.arrival);
    rank.received.insert(wanted);
    channel.pop_front();
    return true;
  }

  void find_what_is_left() {
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
      const auto& steps = table_.ranks[static_cast<size_t>(rank)];
      const size_t next = ranks_[static_cast<size_t>(rank)].next;
      if (next == steps.size()) continue;
      if (!fault_.empty()) fault_ += "; ";
      fault_ += describe(steps[next], rank) + " waits forever";
    }
    if (!fault_.empty()) return;
    for (const auto& [way, channel] : channels_) {
      if (channel.empty()) continue;
      fault_ = fmt::format("rank {}: a message of micro-batch {} for stage {} is never received.",
                           way.second, channel.front().message.micro_batch,
                           channel.front().message.stage);
    }
    for (const Done& one : done_) {
      if (one.forward && one.weight_gradient) continue;
      const auto at = static_cast<int32_t>(&one - done_.data());
      fault_ = fmt::format("stage {} never does the {} of micro-batch {}.", at % shape_.stages(),
                           one.forward ? "backward" : "forward", at / shape_.stages());
    }
  }

  const PipelineTable& table_;
  const PipelineShape& shape_;
  const std::vector<StageCost>& costs_;
  double message_;
  std::vector<Rank> ranks_;
  Channels<Sent> channels_;
  std::vector<Done> done_;
  PipelineTimeline timeline_;
  std::string fault_;
};

}  // namespace

std::string_view name_of(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::one_f_one_b:
      return "1f1b";
    case PipelineSchedule::zb_h1:
      return "zb-h1";
    case PipelineSchedule::zb_v:
      return "zb-v";
  }
  return "?";
}

namespace {

// The interleaved schedule: 1f1b with several stages of each rank.
std::optional<Refusal> check_interleaved(const PipelineShape& shape) {
  if (shape.ranks == 1) {
    return Refusal{.setting = Setting::pipeline_parallel,
                   .message = {fmt::format("{} virtual stages need ", shape.chunks),
                               Setting::pipeline_parallel,
                               " 2 or more; with 1 there is nothing to interleave."}};
  }
  if (shape.micro_batches < shape.ranks) {
    return Refusal{
        .setting = Setting::global_batch_size,
        .message = {fmt::format("The interleaved schedule needs at least as many micro-batches as "
                                "pipeline ranks: {}, not {}. Raise ",
                                shape.ranks, shape.micro_batches),
                    Setting::global_batch_size, ", or leave the virtual stages out."}};
  }
  const auto valid = [&](int64_t size) {
    return size >= shape.ranks &&
           (shape.micro_batches % size == 0 || shape.micro_batches % size >= shape.ranks);
  };
  const int32_t group = shape.group();
  if (group <= shape.micro_batches && valid(group)) return std::nullopt;
  const std::vector<int64_t> nearest = nearest_values(group, shape.micro_batches, valid);
  return Refusal{
      .setting = Setting::micro_batch_group,
      .message = {Setting::micro_batch_group,
                  fmt::format(" {}: it must be at least the {} ranks of the pipeline and at most "
                              "the {} micro-batches, and the last group, of the micro-batches that "
                              "are left, must be none or at least {}, too. Nearest: {}.",
                              group, shape.ranks, shape.micro_batches, shape.ranks,
                              text_of_values(nearest))},
      .nearest = nearest};
}

}  // namespace

std::optional<Refusal> check_stages(PipelineSchedule schedule, int32_t ranks, int32_t chunks) {
  constexpr Setting kSchedule = Setting::pipeline_schedule;
  if (schedule == PipelineSchedule::zb_h1 && chunks != 1) {
    return Refusal{
        .setting = kSchedule,
        .message = {kSchedule,
                    fmt::format(" zb-h1 has one stage per rank, not {}. Leave the virtual stages "
                                "out, or use 1f1b (interleaved) or zb-v.",
                                chunks)}};
  }
  if (schedule == PipelineSchedule::zb_v && (chunks != 2 || ranks == 1)) {
    return Refusal{
        .setting = kSchedule,
        .message = {kSchedule,
                    fmt::format(" zb-v has two stages on each of at least two ranks, not {} on {}. "
                                "Use ",
                                chunks, ranks),
                    Setting::virtual_stages, " 2 with ", Setting::pipeline_parallel,
                    " 2 or more."}};
  }
  return std::nullopt;
}

std::optional<Refusal> check_shape(const PipelineShape& shape) {
  TROUPE_CHECK(shape.ranks >= 1 && shape.chunks >= 1 && shape.micro_batches >= 1,
               "a shape with ranks, chunks and micro-batches");
  constexpr Setting kSchedule = Setting::pipeline_schedule;
  if (shape.merged && shape.schedule != PipelineSchedule::one_f_one_b) {
    return Refusal{.setting = kSchedule,
                   .message = {Setting::merge_micro_batches,
                               " pairs forwards and backwards of 1f1b; ", kSchedule,
                               fmt::format(" {} has an order of its own. Leave one of them out.",
                                           name_of(shape.schedule))}};
  }
  if (auto refusal = check_stages(shape.schedule, shape.ranks, shape.chunks)) return refusal;
  const bool interleaved = shape.schedule == PipelineSchedule::one_f_one_b && shape.chunks > 1;
  if (interleaved) return check_interleaved(shape);
  if (shape.group_size <= 0) return std::nullopt;
  return Refusal{.setting = Setting::micro_batch_group,
                 .message = {Setting::micro_batch_group, " belongs to the interleaved schedule: ",
                             kSchedule, " 1f1b with several virtual stages. Leave it out."}};
}

PipelineTable build_pipeline_table(const PipelineShape& shape) {
  TROUPE_CHECK(!check_shape(shape), "a shape that has a schedule");
  PipelineTable table;
  table.shape = shape;
  const std::vector<Order> orders = computing_orders(shape);
  MessageAdder messages(table, orders);
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    messages.add(rank, orders[static_cast<size_t>(rank)]);
  }
  return table;
}

std::string find_fault(const PipelineTable& table) {
  TROUPE_CHECK(table.ranks.size() == static_cast<size_t>(table.shape.ranks), "steps of each rank");
  const std::vector<StageCost> costs(1);
  return Execution(table, costs, 0).run();
}

PipelineTimeline simulate(const PipelineTable& table, const std::vector<StageCost>& costs,
                          double message) {
  TROUPE_CHECK(costs.size() == 1 || costs.size() == static_cast<size_t>(table.shape.stages()),
               "costs by stage, or one for all");
  Execution execution(table, costs, message);
  const std::string fault = execution.run();
  TROUPE_CHECK(fault.empty(), fault);
  return execution.timeline();
}

std::vector<int32_t> peak_live(const PipelineTable& table) {
  std::vector<int32_t> peaks;
  for (const auto& steps : table.ranks) {
    int32_t live = 0;
    int32_t peak = 0;
    for (const PipelineStep& step : steps) {
      if (step.action == Action::forward) peak = std::max(peak, ++live);
      if (step.action == Action::backward || step.action == Action::weight_gradient) --live;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

std::string draw(const PipelineTable& table, const PipelineTimeline& timeline) {
  const PipelineShape& shape = table.shape;
  const auto label = [&](const PipelineStep& step) {
    constexpr std::string_view kLetters = "FBDW";
    std::string text(1, kLetters[static_cast<size_t>(step.action)]);
    text += std::to_string(step.micro_batch);
    if (shape.chunks > 1) text += static_cast<char>('a' + step.chunk % 26);
    return text;
  };
  const size_t width =
      fmt::formatted_size("{}", shape.micro_batches - 1) + 2 + (shape.chunks > 1 ? 1 : 0);
  std::string text;
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    std::string line;
    for (const TimedStep& timed : timeline.ranks[rank]) {
      const auto begin = static_cast<size_t>(std::llround(timed.begin)) * width;
      const auto end = static_cast<size_t>(std::llround(timed.end)) * width;
      while (line.size() < begin) line += line.size() % width == width / 2 ? '.' : ' ';
      std::string cell = label(timed.step);
      if (begin + cell.size() < end) cell += std::string(end - begin - cell.size() - 1, '-') + ' ';
      line += cell;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += fmt::format("rank {:<3} {}\n", rank, line);
  }
  return text;
}

}  // namespace troupe
