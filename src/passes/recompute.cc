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

class Recomputation {
 public:
  Recomputation(Program& program, const Options& options)
      : program_(program),
        options_(options),
        rewrite_(program),
        region_of_(program.value_count(), -1),
        definer_(program.value_count(), -1),
        stand_in_(program.value_count()) {}

  std::vector<int32_t> run(std::vector<WorkSegment>& segments) {
    for_each_backward(segments, [&](const WorkSegment& forward, const WorkSegment& backward) {
      find_regions(forward);
      find_discarded(forward);
      for (int32_t index = backward.begin; index < backward.end; ++index) read_clones(index);
    });
    std::vector<int32_t> order = rewrite_.order();
    move_segments(segments, rewrite_);
    return order;
  }

 private:
  // What is computed again together.
  struct Region {
    std::vector<int32_t> ops;  // ascending
    bool is_emitted = false;
  };

  void find_regions(const WorkSegment& forward) {
    int32_t first_layer = -1;
    std::map<int32_t, int32_t> numbers;  // by key
    for (int32_t index = forward.begin; index < forward.differentiated_end; ++index) {
      const Op& op = program_.op(index);
      if (first_layer < 0) first_layer = op.place.layer;
      // Gatherings are not kept in any case, and each is a region of its own.
      const int32_t key = gathers_layer_parameters(program_, op)
                              ? -2 - index
                              : region_key(op.place, first_layer, options_);
      if (key == -1) continue;
      const auto [found, is_new] = numbers.emplace(key, static_cast<int32_t>(regions_.size()));
      if (is_new) regions_.emplace_back();
      regions_[static_cast<size_t>(found->second)].ops.push_back(index);
      for (const ValueId output : program_.outputs(op)) {
        TROUPE_CHECK(!is_mutable(program_.value(output).role),
                     "what changes state or metrics cannot be run again");
        region_of_[output] = found->second;
        definer_[output] = index;
      }
    }
  }

  // Takes out what is kept because others read it.
  void find_discarded(const WorkSegment& forward) {
    for (int32_t index = forward.begin; index < forward.end; ++index) {
      const Op& op = program_.op(index);
      for_each_read(program_, op, [&](ValueId id) {
        int32_t& region = region_of_[id];
        if (region < 0 || contains(region, index)) return;
        const Op& made_by = program_.op(definer_[id]);
        const Place& place = made_by.place;
        if (gathers_layer_parameters(program_, made_by)) return;
        if (discards_outputs(place, options_) && place.layer == op.place.layer) return;
        region = -1;
      });
    }
  }

  bool contains(int32_t region, int32_t index) const {
    const std::vector<int32_t>& ops = regions_[static_cast<size_t>(region)].ops;
    return std::binary_search(ops.begin(), ops.end(), index);
  }

  // In whose clones the value has a stand-in; -1: it is kept, or a clone's.
  int32_t region_of(ValueId id) const { return region_of_.has(id) ? region_of_[id] : -1; }

  // Lets operation `index` of a backward read clones' results, and inserts those clones before it.
  void read_clones(int32_t index) {
    std::vector<ValueId> reads;
    for_each_read(program_, program_.op(index), [&](ValueId id) { reads.push_back(id); });
    for (const ValueId id : reads) {
      const int32_t region = region_of(id);
      if (region < 0) continue;
      emit(region, index);
      program_.replace_read(index, id, stand_in_[id]);
    }
  }

  void emit(int32_t number, int32_t before) {
    Region& region = regions_[static_cast<size_t>(number)];
    if (std::exchange(region.is_emitted, true)) return;
    for (const int32_t index : region.ops) {
      const Op op = program_.op(index);
      const auto outputs = program_.outputs(op);
      const std::vector<ValueId> originals(outputs.begin(), outputs.end());
      const auto is_kept = [&](ValueId id) { return region_of(id) < 0; };
      if (std::all_of(originals.begin(), originals.end(), is_kept)) continue;

      std::vector<ValueId> inputs(program_.inputs(op).begin(), program_.inputs(op).end());
      for (ValueId& input : inputs) {
        if (!input.valid() || region_of(input) < 0) continue;
        emit(region_of(input), before);
        input = stand_in_[input];
      }
      Place place = op.place;
      place.phase = Phase::recompute;
      place.recompute_of = index;
      const std::vector<ValueId> results =
          rewrite_.insert_before(before, place, [&](Builder& builder) {
            return builder.emit(*op.spec, op.attributes, inputs, common_name(program_, originals));
          });
      for (size_t i = 0; i < originals.size(); ++i) {
        if (!is_kept(originals[i])) stand_in_[originals[i]] = results[i];
      }
    }
  }

  Program& program_;
  const Options& options_;
  Rewrite rewrite_;
  std::vector<Region> regions_;
  IdVector<ValueId, int32_t> region_of_;
  IdVector<ValueId, int32_t> definer_;  // of what is in a region
  IdVector<ValueId, ValueId> stand_in_;
};

}  // namespace

std::vector<int32_t> recompute_activations(Program& program, std::vector<WorkSegment>& segments,
                                           const RecomputeOptions& options) {
  return Recomputation(program, options).run(segments);
}

}  // namespace troupe
