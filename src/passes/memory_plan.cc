#include "passes/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "program/op_spec.h"

namespace troupe {
namespace {

uint64_t align(uint64_t bytes) {
  return (bytes + MemoryPlan::kAlignment - 1) / MemoryPlan::kAlignment * MemoryPlan::kAlignment;
}

// From the operation that defines a value to the last one that needs it. A value that shares the
// memory of another (its root) has no memory of its own.
struct Lifetime {
  int32_t first = -1;
  int32_t last = -1;
  ValueId root;
};

bool is_transient(const Value& value) {
  return !is_persistent(value.role);
}

std::vector<Lifetime> find_lifetimes(const Program& program) {
  std::vector<Lifetime> lifetimes(static_cast<size_t>(program.value_count()));
  const auto touch = [&](ValueId id, int32_t index) {
    Lifetime& lifetime = lifetimes[static_cast<size_t>(id.index)];
    if (lifetime.first < 0) lifetime.first = index;
    lifetime.last = index;
    lifetime.root = id;
  };
  const auto touch_with_counter = [&](ValueId id, int32_t index) {
    if (!id.valid()) return;
    touch(id, index);
    const RowCount& rows = program.value(id).rows;
    if (rows.valid()) touch(rows.counter, index);
  };
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    for (const ValueId input : program.inputs(op)) touch_with_counter(input, index);
    for (const ValueId output : program.outputs(op)) touch_with_counter(output, index);
    if (op.workspace.valid()) touch(op.workspace, index);
  }
  // What the host reads is live until after the last operation.
  for (const ValueId id : program.results()) touch_with_counter(id, program.op_count() - 1);
  return lifetimes;
}

// Lets results take the memory of operands that die where the operation's kind allows it.
void share_in_place(const Program& program, std::vector<Lifetime>& lifetimes) {
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const OpSpec::InPlace pair = op.spec->in_place;
    if (pair.output < 0) continue;
    const ValueId input = program.inputs(op)[static_cast<size_t>(pair.input)];
    const ValueId output = program.outputs(op)[static_cast<size_t>(pair.output)];
    if (!input.valid() || !is_transient(program.value(input)) ||
        !is_transient(program.value(output))) {
      continue;
    }
    const Lifetime& input_lifetime = lifetimes[static_cast<size_t>(input.index)];
    Lifetime& root = lifetimes[static_cast<size_t>(input_lifetime.root.index)];
    if (input_lifetime.last != index || root.last != index ||
        align(program.value(input).bytes()) != align(program.value(output).bytes())) {
      continue;
    }
    Lifetime& output_lifetime = lifetimes[static_cast<size_t>(output.index)];
    output_lifetime.root = input_lifetime.root;
    root.last = output_lifetime.last;
  }
}

// A piece of memory wanted from operation `first` to operation `last`, both relative to the start
// of the run of operations it belongs to.
struct Block {
  int32_t first;
  int32_t last;
  uint64_t bytes;
  auto operator<=>(const Block&) const = default;
};

// Gives the blocks addresses in the given order, each the lowest address that is free during its
// whole life. Returns the height of the arena.
uint64_t place_in_order(const std::vector<Block>& blocks, const std::vector<int32_t>& order,
                        std::vector<uint64_t>& offsets) {
  uint64_t height = 0;
  std::vector<int32_t> placed;  // by ascending address
  placed.reserve(blocks.size());
  for (const int32_t candidate : order) {
    const Block& block = blocks[static_cast<size_t>(candidate)];
    uint64_t address = 0;
    for (const int32_t other : placed) {
      const Block& neighbour = blocks[static_cast<size_t>(other)];
      if (neighbour.last < block.first || block.last < neighbour.first) continue;
      const uint64_t start = offsets[static_cast<size_t>(other)];
      if (address + block.bytes <= start) break;
      address = std::max(address, start + neighbour.bytes);
    }
    offsets[static_cast<size_t>(candidate)] = address;
    height = std::max(height, address + block.bytes);
    const auto position = std::upper_bound(
        placed.begin(), placed.end(), address,
        [&](uint64_t value, int32_t other) { return value < offsets[static_cast<size_t>(other)]; });
    placed.insert(position, candidate);
  }
  return height;
}

struct Placement {
  std::vector<uint64_t> offsets;
  uint64_t height = 0;
};

// Tries a few orders and keeps the lowest arena. Largest first is nearly always best; the others
// win where many equal blocks overlap in a staircase.
Placement place_blocks(const std::vector<Block>& blocks) {
  std::vector<int32_t> order(blocks.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t i) -> const Block& { return blocks[static_cast<size_t>(i)]; };
  const auto length = [&](int32_t i) { return at(i).last - at(i).first; };

  Placement best;
  const auto attempt = [&](const auto& before) {
    std::stable_sort(order.begin(), order.end(), before);
    Placement placement{std::vector<uint64_t>(blocks.size()), 0};
    placement.height = place_in_order(blocks, order, placement.offsets);
    if (best.offsets.empty() || placement.height < best.height) best = std::move(placement);
  };
  attempt([&](int32_t a, int32_t b) { return at(a).bytes > at(b).bytes; });
  attempt([&](int32_t a, int32_t b) { return length(a) > length(b); });
  attempt([&](int32_t a, int32_t b) {
    return at(a).bytes * static_cast<uint64_t>(length(a) + 1) >
           at(b).bytes * static_cast<uint64_t>(length(b) + 1);
  });
  attempt([&](int32_t a, int32_t b) { return at(a).first < at(b).first; });
  return best;
}

// The program cut into maximal runs of operations of one micro-batch. Returns for each operation
// the first operation of its run.
std::vector<int32_t> find_runs(const Program& program) {
  std::vector<int32_t> start(static_cast<size_t>(program.op_count()));
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const bool continues =
        index > 0 && program.op(index).place.micro_batch == program.op(index - 1).place.micro_batch;
    start[static_cast<size_t>(index)] = continues ? start[static_cast<size_t>(index - 1)] : index;
  }
  return start;
}

void place_transients(const Program& program, const std::vector<Lifetime>& lifetimes,
                      MemoryPlan& plan) {
  const std::vector<int32_t> run_start = find_runs(program);
  uint64_t long_lived = 0;
  std::map<int32_t, std::vector<ValueId>> values_of_run;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Lifetime& lifetime = lifetimes[static_cast<size_t>(i)];
    if (!is_transient(program.value(ValueId{i})) || lifetime.root != ValueId{i}) continue;
    const int32_t run = run_start[static_cast<size_t>(lifetime.first)];
    if (run == run_start[static_cast<size_t>(lifetime.last)]) {
      values_of_run[run].push_back(ValueId{i});
    } else {
      plan.offset[static_cast<size_t>(i)] = long_lived;
      long_lived += align(program.value(ValueId{i}).bytes());
    }
  }

  std::map<std::vector<Block>, Placement> known;
  uint64_t highest = 0;
  for (const auto& [run, values] : values_of_run) {
    std::vector<Block> blocks;
    blocks.reserve(values.size());
    for (const ValueId id : values) {
      const Lifetime& lifetime = lifetimes[static_cast<size_t>(id.index)];
      blocks.push_back(
          {lifetime.first - run, lifetime.last - run, align(program.value(id).bytes())});
    }
    auto found = known.find(blocks);
    if (found == known.end()) found = known.emplace(blocks, place_blocks(blocks)).first;
    const Placement& placement = found->second;
    for (size_t i = 0; i < values.size(); ++i) {
      plan.offset[static_cast<size_t>(values[i].index)] = long_lived + placement.offsets[i];
    }
    highest = std::max(highest, placement.height);
  }
  plan.transient_bytes = long_lived + highest;

  for (int32_t i = 0; i < program.value_count(); ++i) {
    const ValueId root = lifetimes[static_cast<size_t>(i)].root;
    if (root.valid() && is_transient(program.value(root))) {
      plan.offset[static_cast<size_t>(i)] = plan.offset[static_cast<size_t>(root.index)];
    }
  }
}

// Bytes of each transient role that are live while each operation runs; fills the plan's
// statistics.
void count_live_bytes(const Program& program, const std::vector<Lifetime>& lifetimes,
                      MemoryPlan& plan) {
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<std::array<int64_t, kRoleCount>> change(ops + 1);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Lifetime& lifetime = lifetimes[static_cast<size_t>(i)];
    const Value& value = program.value(ValueId{i});
    if (!is_transient(value) || lifetime.root != ValueId{i}) continue;
    const auto role = static_cast<size_t>(value.role);
    const auto bytes = static_cast<int64_t>(align(value.bytes()));
    change[static_cast<size_t>(lifetime.first)][role] += bytes;
    change[static_cast<size_t>(lifetime.last) + 1][role] -= bytes;
  }
  plan.live_bytes.resize(ops);
  std::array<int64_t, kRoleCount> live{};
  std::array<int64_t, kRoleCount> live_at_peak{};
  for (size_t index = 0; index < ops; ++index) {
    int64_t sum = 0;
    for (size_t role = 0; role < kRoleCount; ++role) {
      live[role] += change[index][role];
      sum += live[role];
    }
    plan.live_bytes[index] = static_cast<uint64_t>(sum);
    if (plan.live_bytes[index] > plan.largest_live_bytes) {
      plan.largest_live_bytes = plan.live_bytes[index];
      live_at_peak = live;
    }
  }
  for (size_t role = 0; role < kRoleCount; ++role) {
    plan.bytes_by_role[role] += static_cast<uint64_t>(live_at_peak[role]);
  }
  plan.bytes_by_role[static_cast<size_t>(Role::activation)] +=
      plan.transient_bytes - plan.largest_live_bytes;
  plan.bytes_by_role[static_cast<size_t>(Role::workspace)] += plan.scratch_bytes();
}

// Everything but the transient values.
MemoryPlan plan_fixed_parts(const Program& program, int threads) {
  MemoryPlan plan;
  plan.threads = threads;
  const StateLayout state(program.state());
  plan.state_bytes = state.bytes;
  plan.bytes_by_role = state.bytes_by_role;
  plan.offset.resize(static_cast<size_t>(program.value_count()), 0);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (!is_persistent(value.role) || is_state(value.role)) continue;
    plan.offset[static_cast<size_t>(i)] = plan.persistent_bytes;
    plan.persistent_bytes += align(value.bytes());
    plan.bytes_by_role[static_cast<size_t>(value.role)] += align(value.bytes());
  }
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec->scratch_bytes == nullptr) continue;
    plan.scratch_bytes_per_thread =
        std::max(plan.scratch_bytes_per_thread, align(op.spec->scratch_bytes(OpView{program, op})));
  }
  return plan;
}

}  // namespace

StateLayout::StateLayout(const StateTable& state) {
  offset.resize(static_cast<size_t>(state.size()));
  for (int32_t i = 0; i < state.size(); ++i) {
    const StateTensor& tensor = state[StateId{i}];
    const uint64_t size =
        align(static_cast<uint64_t>(tensor.shape.elements()) * size_of(tensor.dtype));
    offset[static_cast<size_t>(i)] = bytes;
    bytes += size;
    bytes_by_role[static_cast<size_t>(tensor.role)] += size;
  }
}

MemoryPlan plan_memory(const Program& program, int threads) {
  MemoryPlan plan = plan_fixed_parts(program, threads);
  std::vector<Lifetime> lifetimes = find_lifetimes(program);
  share_in_place(program, lifetimes);
  place_transients(program, lifetimes, plan);
  count_live_bytes(program, lifetimes, plan);
  return plan;
}

MemoryPlan plan_oracle(const Program& program, int threads) {
  MemoryPlan plan = plan_fixed_parts(program, threads);
  const std::vector<Lifetime> lifetimes = find_lifetimes(program);
  plan.dead_after.resize(static_cast<size_t>(program.op_count()));
  const auto results = program.results();
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    const Lifetime& lifetime = lifetimes[static_cast<size_t>(i)];
    if (!is_transient(value) || !lifetime.root.valid()) continue;
    plan.offset[static_cast<size_t>(i)] = plan.transient_bytes;
    plan.transient_bytes += align(value.bytes());
    if (std::find(results.begin(), results.end(), ValueId{i}) == results.end()) {
      plan.dead_after[static_cast<size_t>(lifetime.last)].push_back(ValueId{i});
    }
  }
  count_live_bytes(program, lifetimes, plan);
  return plan;
}

void verify_memory_plan(const Program& program, const MemoryPlan& plan) {
  std::vector<Lifetime> lifetimes = find_lifetimes(program);
  std::vector<std::vector<ValueId>> begins(static_cast<size_t>(program.op_count()));
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    const Lifetime& lifetime = lifetimes[static_cast<size_t>(i)];
    if (!is_transient(value) || !lifetime.root.valid()) continue;
    TROUPE_CHECK(plan.offset[static_cast<size_t>(i)] + align(value.bytes()) <= plan.transient_bytes,
                 value.name + " lies outside the transient arena");
    begins[static_cast<size_t>(lifetime.first)].push_back(ValueId{i});
  }
  // Values that are live while the current operation runs, by address.
  std::map<std::pair<uint64_t, int32_t>, ValueId> live;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    std::erase_if(live, [&](const auto& entry) {
      return lifetimes[static_cast<size_t>(entry.second.index)].last < index;
    });
    const OpSpec::InPlace pair = op.spec->in_place;
    for (const ValueId id : begins[static_cast<size_t>(index)]) {
      const uint64_t begin = plan.offset[static_cast<size_t>(id.index)];
      const uint64_t end = begin + program.value(id).bytes();
      for (const auto& [key, other] : live) {
        const uint64_t other_begin = key.first;
        const uint64_t other_end = other_begin + program.value(other).bytes();
        if (end <= other_begin || other_end <= begin) continue;
        const bool stored_over_operand =
            pair.output >= 0 && program.outputs(op)[static_cast<size_t>(pair.output)] == id &&
            program.inputs(op)[static_cast<size_t>(pair.input)] == other && begin == other_begin &&
            lifetimes[static_cast<size_t>(other.index)].last == index;
        TROUPE_CHECK(stored_over_operand, program.value(id).name + " overlaps " +
                                              program.value(other).name + " at operation " +
                                              std::to_string(index));
      }
      live.emplace(std::pair{begin, id.index}, id);
    }
  }
}

}  // namespace troupe
