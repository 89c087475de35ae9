#include "passes/recompute.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "passes/communication_order.h"

namespace troupe {
namespace {

using Options = RecomputeOptions;

// Operations with the same key, not -1, are computed again together: in selective recompute those
// of one layer and kind of region, in full recompute those of a group of layers.
int32_t region_key(const Place& place, int32_t first_layer, const Options& options) {
  if (place.layer < 0) return -1;
  if (options.granularity == Options::Granularity::full) {
    const int32_t layer = place.layer - first_layer;
    if (options.method == Options::Method::uniform) return layer / options.layers;
    return layer < options.layers ? layer : -1;
  }
  const bool in_moe = options.moe;
  bool chosen = false;
  Module region = place.module;
  switch (place.module) {
    case Module::attention_norm:
    case Module::mlp_norm:
      chosen = options.norms;
      region = Module::attention_norm;
      break;
    case Module::core_attention:
      chosen = options.core_attention;
      break;
    case Module::mlp:
      chosen = options.mlp;
      break;
    case Module::moe:
      chosen = in_moe;
      break;
    case Module::expert_fc1:
      chosen = in_moe;
      region = Module::moe;
      break;
    case Module::expert_activation:
      chosen = in_moe || options.expert_activation;
      if (in_moe) region = Module::moe;
      break;
    case Module::shared_expert:
      chosen = in_moe || options.shared_experts;
      if (in_moe) region = Module::moe;
      break;
    case Module::other:
    case Module::attention:
    case Module::qkv:
    case Module::attention_out:
      break;
  }
  constexpr int32_t kModules = static_cast<int32_t>(Module::shared_expert) + 1;
  return chosen ? place.layer * kModules + static_cast<int32_t>(region) : -1;
}

// What stands around the layers is gathered once: the backward pass begins with the head, and does
// not read the embedding.
bool gathers_layer_parameters(const Program& program, const Op& op) {
  return op.place.layer >= 0 && gathers_parameters(program, op);
}

// Are outputs that others of the same layer read computed again, too?
bool discards_outputs(const Place& place, const Options& options) {
  if (options.granularity == Options::Granularity::full) return false;
  return place.module == Module::attention_norm || place.module == Module::mlp_norm ||
         (place.module == Module::expert_activation && !options.moe);
}

// Calls visit(value) for the values that the operation reads, and the counters of their rows.
template <class Visit>
void for_each_read(const Program& program, const Op& op, const Visit& visit) {
  for (const ValueId id : program.inputs(op)) {
    if (!id.valid()) continue;
    visit(id);
    const RowCount& rows = program.value(id).rows;
    if (rows.valid()) visit(rows.counter);
  }
}

// What the names of an operation's results have in common is what they were named after.
std::string common_name(const Program& program, std::span<const ValueId> results) {
  std::string common = program.value(results.front()).name;
  for (const ValueId id : results) {
    const std::string& name = program.value(id).name;
    common.erase(std::mismatch(common.begin(), common.end(), name.begin(), name.end()).first,
                 common.end());
  }
  if (!common.empty() && common.back() == '.') common.pop_back();
  return common;
}

}  // namespace

Recompute::Recompute(const Program& program, int32_t first, int32_t last, const Options& options)
    : region_of_(program.value_count(), -1) {
  find_regions(program, first, last, options);
  find_discarded(program, first, options);
}

void Recompute::find_regions(const Program& program, int32_t first, int32_t last,
                             const Options& options) {
  int32_t first_layer = -1;
  std::map<int32_t, int32_t> numbers;  // by key
  for (int32_t index = first; index < last; ++index) {
    const Op& op = program.op(index);
    if (first_layer < 0) first_layer = op.place.layer;
    // Gatherings are not kept in any case, and each is a region of its own.
    const int32_t key = gathers_layer_parameters(program, op)
                            ? -2 - index
                            : region_key(op.place, first_layer, options);
    if (key == -1) continue;
    const auto [found, is_new] = numbers.emplace(key, static_cast<int32_t>(regions_.size()));
    if (is_new) regions_.emplace_back();
    regions_[static_cast<size_t>(found->second)].ops.push_back(index);
    for (const ValueId output : program.outputs(op)) {
      TROUPE_CHECK(!is_mutable(program.value(output).role),
                   "what changes state or metrics cannot be run again");
      region_of_[output] = found->second;
    }
  }
}

// Takes out what is kept because others read it.
void Recompute::find_discarded(const Program& program, int32_t first, const Options& options) {
  std::vector<int32_t> region_of_op(static_cast<size_t>(program.op_count() - first), -1);
  IdVector<ValueId, int32_t> definer(program.value_count(), -1);
  for (size_t number = 0; number < regions_.size(); ++number) {
    for (const int32_t index : regions_[number].ops) {
      region_of_op[static_cast<size_t>(index - first)] = static_cast<int32_t>(number);
      for (const ValueId output : program.outputs(program.op(index))) {
        definer[output] = index;
      }
    }
  }
  for (int32_t index = first; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    for_each_read(program, op, [&](ValueId id) {
      int32_t& region = region_of_[id];
      if (region < 0 || region == region_of_op[static_cast<size_t>(index - first)]) return;
      const Op& made_by = program.op(definer[id]);
      const Place& place = made_by.place;
      if (gathers_layer_parameters(program, made_by)) return;
      if (discards_outputs(place, options) && place.layer == op.place.layer) return;
      region = -1;
    });
  }
}

int32_t Recompute::region_of(ValueId id) const {
  return id.valid() && region_of_.has(id) ? region_of_[id] : -1;
}

void Recompute::emit_for(Builder& builder, int32_t op, IdVector<ValueId, ValueId>& stand_in,
                         const BeforeClone& before_clone) {
  const Program& program = builder.program();
  std::vector<ValueId> operands;
  for_each_read(program, program.op(op), [&](ValueId id) { operands.push_back(id); });
  const auto outputs = program.outputs(program.op(op));
  operands.insert(operands.end(), outputs.begin(), outputs.end());
  for (const ValueId id : operands) {
    if (const int32_t region = region_of(id); region >= 0) {
      emit(builder, regions_[static_cast<size_t>(region)], stand_in, before_clone);
    }
  }
}

void Recompute::emit(Builder& builder, Region& region, IdVector<ValueId, ValueId>& stand_in,
                     const BeforeClone& before_clone) {
  if (std::exchange(region.is_emitted, true)) return;
  if (stand_in.size() < region_of_.size()) stand_in.resize(region_of_.size());
  Program& program = builder.program();
  const PlaceScope scope(builder);
  for (const int32_t index : region.ops) {
    const Op op = program.op(index);
    const auto outputs = program.outputs(op);
    const std::vector<ValueId> originals(outputs.begin(), outputs.end());
    const auto is_kept = [&](ValueId id) { return region_of(id) < 0; };
    if (std::all_of(originals.begin(), originals.end(), is_kept)) continue;

    std::vector<ValueId> inputs(program.inputs(op).begin(), program.inputs(op).end());
    for (const ValueId input : inputs) {
      const int32_t other = region_of(input);
      if (other >= 0) emit(builder, regions_[static_cast<size_t>(other)], stand_in, before_clone);
    }
    if (before_clone) before_clone(index, stand_in);
    for (ValueId& input : inputs) {
      if (!input.valid() || !stand_in.has(input)) continue;
      const ValueId instead = stand_in[input];
      if (instead.valid()) input = instead;
    }
    builder.place = op.place;
    builder.place.phase = Phase::recompute;
    builder.place.recompute_of = index;
    clones_.push_back(program.op_count());
    const std::vector<ValueId> results =
        builder.emit(*op.spec, op.attributes, inputs, common_name(program, originals));
    for (size_t i = 0; i < originals.size(); ++i) {
      if (!is_kept(originals[i])) stand_in[originals[i]] = results[i];
    }
  }
}

std::vector<int32_t> find_unread(const Program& program, std::span<const int32_t> operations) {
  if (operations.empty()) return {};
  OpVector<bool> is_listed(program.op_count(), false);
  for (const int32_t index : operations) is_listed[index] = true;
  IdVector<ValueId, bool> read(program.value_count(), false);
  const auto mark = [&](int32_t index) {
    for_each_read(program, program.op(index), [&](ValueId id) { read[id] = true; });
  };
  for (int32_t index = operations.front(); index < program.op_count(); ++index) {
    if (!is_listed[index]) mark(index);
  }
  std::vector<int32_t> unread;
  for (size_t i = operations.size(); i-- > 0;) {
    const auto outputs = program.outputs(program.op(operations[i]));
    const bool needed =
        std::any_of(outputs.begin(), outputs.end(), [&](ValueId id) { return read[id]; });
    needed ? mark(operations[i]) : unread.push_back(operations[i]);
  }
  std::reverse(unread.begin(), unread.end());
  return unread;
}

}  // namespace troupe
