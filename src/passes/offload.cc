#include "passes/offload.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "ops/exchange/offload/offload.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

// A fraction such as 0.3 must not lose a group to its rounding.
constexpr double kFractionSlack = 1e-9;

bool copies_out(const Program& program, const Op& op) {
  const auto outputs = program.outputs(op);
  return !outputs.empty() && is_on_host(program.value(outputs.front()).role);
}

bool copies_in(const Program& program, const Op& op) {
  const auto inputs = program.inputs(op);
  return !inputs.empty() && inputs.front().valid() &&
         is_on_host(program.value(inputs.front()).role);
}

class Offloading {
 public:
  Offloading(Program& program, const OffloadOptions& options)
      : program_(program),
        options_(options),
        rewrite_(program),
        backward_reading_(program.value_count(), -1),
        stand_in_(program.value_count()) {}

  std::vector<int32_t> run(std::vector<WorkSegment>& segments) {
    for_each_backward(segments, [&](const WorkSegment& forward, const WorkSegment& backward) {
      note_reads(backward);
      choose_groups(forward);
      copy_for(backward);
    });
    std::vector<int32_t> order = rewrite_.order();
    move_segments(segments, rewrite_.new_begins());
    return order;
  }

 private:
  // A module of a layer, and what it may offload.
  using GroupKey = std::pair<int32_t, const ModuleSpec*>;
  struct Group {
    std::set<int32_t> values;
    bool is_chosen = true;
  };

  static GroupKey group_of(const Op& op) { return {op.place.layer, op.place.module}; }

  void note_reads(const WorkSegment& backward) {
    for (int32_t index = backward.begin; index < backward.end; ++index) {
      for (const ValueId id : program_.inputs(program_.op(index))) {
        if (id.valid()) backward_reading_[id] = backward.begin;
      }
    }
    current_ = backward.begin;
  }

  bool is_candidate(ValueId id) const {
    if (!id.valid()) return false;
    const Value& value = program_.value(id);
    return value.role == Role::activation && is_float(value.dtype) &&
           value.shape.elements() >= options_.least_elements && backward_reading_[id] == current_;
  }

  void choose_groups(const WorkSegment& forward) {
    last_layer_ = -1;
    for (int32_t index = forward.begin; index < forward.differentiated_end; ++index) {
      last_layer_ = std::max<int32_t>(last_layer_, program_.op(index).place.layer);
    }
    groups_.clear();
    std::vector<GroupKey> in_order;
    for (int32_t index = forward.begin; index < forward.differentiated_end; ++index) {
      const Op& op = program_.op(index);
      const ModuleSpec* chosen = chosen_of(options_.modules, op.place.module);
      if (chosen == nullptr || op.place.layer >= last_layer_) continue;
      const auto add = [&](std::span<const ValueId> operands) {
        for (const ValueId id : operands) {
          if (!is_candidate(id)) continue;
          const auto [found, is_new] = groups_.try_emplace(group_of(op));
          if (is_new) in_order.push_back(group_of(op));
          found->second.values.insert(id.index);
        }
      };
      add(program_.inputs(op));
      if (chosen->offloads_outputs) add(program_.outputs(op));
    }
    // As Megatron rounds: what stays is rounded down.
    const auto groups = static_cast<double>(in_order.size());
    const auto staying =
        static_cast<size_t>(std::floor(groups * (1 - options_.fraction) + kFractionSlack));
    for (size_t i = in_order.size() - staying; i < in_order.size(); ++i) {
      groups_[in_order[i]].is_chosen = false;
    }
  }

  // The layer whose gradients operation `index` or, of a clone, the first operation after it
  // computes.
  int32_t layer_at(int32_t index, int32_t end) const {
    while (index < end && program_.op(index).place.phase == Phase::recompute) ++index;
    return index < end ? program_.op(index).place.layer : -1;
  }

  void copy_for(const WorkSegment& backward) {
    std::vector<ValueId> read;  // by an operation before
    for (int32_t index = backward.begin; index < backward.end; ++index) {
      const auto found = groups_.find(group_of(program_.op(index)));
      const int32_t layer = layer_at(index, backward.end);
      const bool may_copy =
          found != groups_.end() && found->second.is_chosen && layer >= 0 && layer < last_layer_;
      const auto inputs = program_.inputs(program_.op(index));
      for (const ValueId id : std::vector<ValueId>(inputs.begin(), inputs.end())) {
        if (!id.valid()) continue;
        ValueId& stand_in = stand_in_[id];
        if (std::exchange(backward_reading_[id], -1) == current_) {
          read.push_back(id);
          stand_in =
              may_copy && found->second.values.contains(id.index) ? copy(id, index) : ValueId{};
        }
        if (stand_in.valid()) program_.replace_read(index, id, stand_in);
      }
    }
    for (const ValueId id : read) stand_in_[id] = {};
  }

  // To the host and back, before operation `index`.
  ValueId copy(ValueId id, int32_t index) {
    const std::string name = program_.value(id).name;
    Place place = program_.op(index).place;
    place.recompute_of = -1;
    place.phase = Phase::forward;
    const ValueId host = rewrite_.insert_before(
        index, place, [&](Builder& builder) { return offload(builder, id, name + "_on_host"); });
    place.phase = Phase::data_gradient;
    return rewrite_.insert_before(index, place,
                                  [&](Builder& builder) { return reload(builder, host, name); });
  }

  Program& program_;
  const OffloadOptions& options_;
  Rewrite rewrite_;
  // Of a value: the backward that is worked on if it reads the value and has not done so yet.
  IdVector<ValueId, int32_t> backward_reading_;
  IdVector<ValueId, ValueId> stand_in_;
  int32_t current_ = -1;  // that backward, by its first operation
  int32_t last_layer_ = -1;
  std::map<GroupKey, Group> groups_;
};

}  // namespace

std::vector<int32_t> offload_activations(Program& program, std::vector<WorkSegment>& segments,
                                         const OffloadOptions& options) {
  return Offloading(program, options).run(segments);
}

std::vector<int32_t> order_copies(const Program& program) {
  OpVector<std::vector<int32_t>> after(program.op_count());
  OpVector<std::vector<int32_t>> before(program.op_count());
  OpVector<bool> is_moved(program.op_count(), false);
  // By micro-batch and chunk: the operations that compute data gradients.
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> gradients;
  const auto pass_of = [](const Place& place) { return std::pair(place.micro_batch, place.chunk); };
  const auto layer_of = [&](int32_t index) { return program.op(index).place.layer; };
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Place& place = program.op(index).place;
    if (place.phase != Phase::data_gradient || place.queue != Queue::compute) continue;
    gradients[pass_of(place)].push_back(index);
  }
  IdVector<ValueId, int32_t> last_use(program.value_count(), -1);
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (copies_out(program, op)) {
      const int32_t place = last_use[program.inputs(op).front()];
      TROUPE_CHECK(place >= 0, "what is offloaded was computed before");
      after[place].push_back(index);
      is_moved[index] = true;
    } else if (copies_in(program, op)) {
      const std::vector<int32_t>& own = gradients[pass_of(op.place)];
      auto begin = std::lower_bound(own.begin(), own.end(), index);
      if (begin == own.end() && begin != own.begin()) --begin;
      // To the beginning of this layer's gradients, then to that of the layer before it.
      for (int stretch = 0; stretch < 2; ++stretch) {
        if (begin == own.begin()) break;
        if (stretch > 0) --begin;
        const int16_t layer = layer_of(*begin);
        while (begin != own.begin() && layer_of(*std::prev(begin)) == layer) --begin;
      }
      if (begin == own.end() || *begin > index) continue;
      before[*begin].push_back(index);
      is_moved[index] = true;
    } else {
      for (const auto operands : {program.inputs(op), program.outputs(op)}) {
        for (const ValueId id : operands) {
          if (id.valid()) last_use[id] = index;
        }
      }
    }
  }
  std::vector<int32_t> order;
  order.reserve(static_cast<size_t>(program.op_count()));
  for (int32_t i = 0; i < program.op_count(); ++i) {
    order.insert(order.end(), before[i].begin(), before[i].end());
    if (!is_moved[i]) order.push_back(i);
    order.insert(order.end(), after[i].begin(), after[i].end());
  }
  return order;
}

}  // namespace troupe
