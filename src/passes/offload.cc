#include "passes/offload.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "ops/offload/offload.h"

namespace troupe {
namespace {

bool is_chosen(Module module, const OffloadOptions& options) {
  switch (module) {
    case Module::attention_norm:
      return options.attention_norm;
    case Module::mlp_norm:
      return options.mlp_norm;
    case Module::qkv:
      return options.qkv;
    case Module::core_attention:
      return options.core_attention;
    case Module::attention_out:
      return options.attention_out;
    case Module::expert_fc1:
      return options.expert_fc1;
    case Module::expert_activation:
      return options.expert_activation;
    case Module::other:
    case Module::attention:
    case Module::mlp:
    case Module::moe:
    case Module::shared_expert:
      break;
  }
  return false;
}

// A fraction such as 0.3 must not lose a group to its rounding.
constexpr double kFractionSlack = 1e-9;

bool is_norm(const Op& op) {
  return op.place.module == Module::attention_norm || op.place.module == Module::mlp_norm;
}

bool copies_out(const Program& program, const Op& op) {
  const auto outputs = program.outputs(op);
  return !outputs.empty() && is_on_host(program.value(outputs.front()).role);
}

bool copies_in(const Program& program, const Op& op) {
  const auto inputs = program.inputs(op);
  return !inputs.empty() && inputs.front().valid() &&
         is_on_host(program.value(inputs.front()).role);
}

}  // namespace

Offload::Offload(const Program& program, int32_t first, int32_t last, const OffloadOptions& options,
                 const Recompute* recompute)
    : first_(first),
      least_elements_(options.least_elements),
      recompute_(recompute),
      is_chosen_(static_cast<size_t>(last - first), false),
      is_read_(program.value_count(), false) {
  for (int32_t index = first; index < last; ++index) {
    last_layer_ = std::max<int32_t>(last_layer_, program.op(index).place.layer);
  }
  choose_groups(program, last, options);
}

bool Offload::is_candidate(const Program& program, ValueId id) const {
  if (!id.valid()) return false;
  const Value& value = program.value(id);
  return value.role == Role::activation && is_float(value.dtype) &&
         value.shape.elements() >= least_elements_ &&
         (recompute_ == nullptr || !recompute_->discards(id));
}

std::vector<ValueId> Offload::candidates_of(const Program& program, const Op& op) const {
  std::vector<ValueId> list;
  const auto add = [&](std::span<const ValueId> operands) {
    for (const ValueId id : operands) {
      if (is_candidate(program, id)) list.push_back(id);
    }
  };
  add(program.inputs(op));
  if (is_norm(op)) add(program.outputs(op));
  return list;
}

void Offload::choose_groups(const Program& program, int32_t last, const OffloadOptions& options) {
  // By layer and module: which one it is, of those that have something to offload.
  std::map<std::pair<int32_t, Module>, int64_t> numbers;
  const auto group_of = [](const Op& op) { return std::pair(op.place.layer, op.place.module); };
  for (int32_t index = first_; index < last; ++index) {
    const Op& op = program.op(index);
    if (!is_chosen(op.place.module, options) || op.place.layer >= last_layer_) continue;
    if (candidates_of(program, op).empty()) continue;
    numbers.try_emplace(group_of(op), static_cast<int64_t>(numbers.size()));
  }
  const auto groups = static_cast<int64_t>(numbers.size());
  // As Megatron rounds: what stays is rounded down.
  const auto staying = static_cast<int64_t>(
      std::floor(static_cast<double>(groups) * (1 - options.fraction) + kFractionSlack));
  for (int32_t index = first_; index < last; ++index) {
    const auto found = numbers.find(group_of(program.op(index)));
    is_chosen_[static_cast<size_t>(index - first_)] =
        found != numbers.end() && found->second < groups - staying;
  }
}

void Offload::note_reads(const Program& program) {
  if (noted_ < 0) noted_ = program.op_count();  // the backward begins
  is_read_.resize(program.value_count(), false);
  for (; noted_ < program.op_count(); ++noted_) {
    const Op& op = program.op(noted_);
    if (op.place.queue == Queue::copy) continue;
    for (const ValueId id : program.inputs(op)) {
      if (id.valid()) is_read_[id] = true;
    }
  }
}

void Offload::take_back_unread(IdVector<ValueId, ValueId>& stand_in) {
  for (const StandIn& each : std::exchange(offered_, {})) {
    if (is_read_[each.reload]) continue;
    stand_in[each.original] = ValueId{};
  }
}

void Offload::emit_for(Builder& builder, int32_t op, int32_t reader,
                       IdVector<ValueId, ValueId>& stand_in) {
  Program& program = builder.program();
  note_reads(program);
  if (op != current_op_) take_back_unread(stand_in);
  current_op_ = op;
  const int32_t layer = program.op(op).place.layer;
  if (layer < 0 || layer >= last_layer_ || !is_chosen_[static_cast<size_t>(reader - first_)]) {
    return;
  }
  const PlaceScope scope(builder, program.op(reader).place);
  for (const ValueId id : candidates_of(program, program.op(reader))) {
    if (is_read_[id]) continue;
    if (!stand_in.has(id)) stand_in.resize(id.index + 1);
    if (stand_in[id].valid()) continue;
    const std::string name = program.value(id).name;
    builder.place.phase = Phase::forward;
    copies_.push_back(program.op_count());
    const ValueId host = offload(builder, id, name + "_on_host");
    builder.place.phase = Phase::data_gradient;
    copies_.push_back(program.op_count());
    stand_in[id] = reload(builder, host, name);
    offered_.push_back({id, stand_in[id]});
  }
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
