#include "passes/recompute.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "passes/communication_order.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

using Options = RecomputeOptions;

// What is computed again together: in selective recompute the operations of one layer and module,
// in full recompute those of a group of layers; and of a block in rounds those of one round.
struct RegionKey {
  int32_t layer;
  const ModuleSpec* module;
  int32_t round = 0;
  auto operator<=>(const RegionKey&) const = default;
};

std::optional<RegionKey> region_key(const Place& place, int32_t first_layer,
                                    const Options& options) {
  if (place.layer < 0 || place.micro_batch < 0) return std::nullopt;
  if (place.round > 0) return RegionKey{place.layer, nullptr, place.round};
  if (options.granularity == Options::Granularity::full) {
    const int32_t layer = place.layer - first_layer;
    if (options.method == Options::Method::uniform) return RegionKey{layer / options.layers, {}};
    if (layer >= options.layers) return std::nullopt;
    return RegionKey{layer, nullptr};
  }
  const ModuleSpec* chosen = chosen_of(options.modules, place.module);
  if (chosen == nullptr) return std::nullopt;
  return RegionKey{place.layer, chosen};
}

// What stands around the layers is gathered once: the backward pass begins with the head, and does
// not read the embedding.
bool is_never_kept(const Op& op) {
  return op.spec->is_run_again || (op.place.layer >= 0 && gathers_parameters(op));
}

// Are outputs that others of the same layer read computed again, too?
bool discards_outputs(const Place& place, const Options& options) {
  const ModuleSpec* chosen = chosen_of(options.modules, place.module);
  return chosen != nullptr && chosen->discards_outputs;
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
    move_segments(segments, rewrite_.new_begins());
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
    std::map<RegionKey, int32_t> numbers;
    for (int32_t index = forward.begin; index < forward.differentiated_end; ++index) {
      const Op& op = program_.op(index);
      if (first_layer < 0) first_layer = op.place.layer;
      // Gatherings and copies are not kept in any case, and each is a region of its own.
      const std::optional<RegionKey> key = is_never_kept(op)
                                               ? RegionKey{-1 - index, nullptr}
                                               : region_key(op.place, first_layer, options_);
      if (!key) continue;
      const auto [found, is_new] = numbers.emplace(*key, static_cast<int32_t>(regions_.size()));
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
        if (region < 0 || op.place.round > 0 || contains(region, index)) return;
        const Op& made_by = program_.op(definer_[id]);
        const Place& place = made_by.place;
        if (is_never_kept(made_by)) return;
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
    // Where the rows of what it reads are counted by a clone already, those of its results are,
    // too.
    for (const ValueId id : program_.outputs(program_.op(index))) {
      const RowCount& rows = program_.value(id).rows;
      if (rows.valid()) reads.push_back(rows.counter);
    }
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
