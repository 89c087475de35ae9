#include "passes/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/id_vector.h"
#include "passes/cuda_scratch.h"
#include "passes/queue_events.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

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

IdVector<ValueId, Lifetime> find_lifetimes(const Program& program, Device device) {
  IdVector<ValueId, Lifetime> lifetimes(program.value_count());
  const auto touch = [&](ValueId id, int32_t index) {
    Lifetime& lifetime = lifetimes[id];
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
    if (op.workspace.valid() && device == Device::cpu) touch(op.workspace, index);
  }
  // What the host reads is live until after the last operation.
  for (const ValueId id : program.results()) touch_with_counter(id, program.op_count() - 1);
  return lifetimes;
}

// Lets results take the memory of operands that die where the operation's kind allows it.
void share_in_place(const Program& program, IdVector<ValueId, Lifetime>& lifetimes) {
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
    const Lifetime& input_lifetime = lifetimes[input];
    Lifetime& root = lifetimes[input_lifetime.root];
    if (input_lifetime.last != index || root.last != index ||
        MemoryPlan::aligned(program.value(input).bytes()) !=
            MemoryPlan::aligned(program.value(output).bytes())) {
      continue;
    }
    Lifetime& output_lifetime = lifetimes[output];
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
uint64_t assign_addresses(const std::vector<Block>& blocks, const std::vector<int32_t>& order,
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
    placement.height = assign_addresses(blocks, order, placement.offsets);
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

// Passes whose operations are interleaved are one run: gives the runs that lie between the first
// and the last operation of a forward, or of a backward without its weight gradients, one number.
void join_interleaved(const Program& program, OpVector<int32_t>& run) {
  using Pass = std::tuple<int32_t, int32_t, bool>;    // micro-batch, chunk, forward?
  std::map<Pass, std::pair<int32_t, int32_t>> reach;  // first and last run
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Place& place = program.op(index).place;
    if (place.micro_batch < 0 || place.queue == Queue::communication ||
        place.phase == Phase::weight_gradient) {
      continue;
    }
    const int32_t number = run[index];
    const auto [pass, is_new] = reach.try_emplace(
        {place.micro_batch, place.chunk, place.phase == Phase::forward}, number, number);
    pass->second.second = number;
  }
  if (run.empty()) return;
  std::vector<int32_t> joined_to(static_cast<size_t>(run[run.size() - 1]) + 1,
                                 0);  // by run: a later one
  for (const auto& [pass, runs] : reach) {
    int32_t& last = joined_to[static_cast<size_t>(runs.first)];
    last = std::max(last, runs.second);
  }
  std::vector<int32_t> renumbered(joined_to.size(), 0);
  int32_t number = -1;
  int32_t end = -1;  // the last run that belongs to the current number
  for (size_t i = 0; i < joined_to.size(); ++i) {
    if (static_cast<int32_t>(i) > end) ++number;
    end = std::max({end, joined_to[i], static_cast<int32_t>(i)});
    renumbered[i] = number;
  }
  for (int32_t& each : run) each = renumbered[static_cast<size_t>(each)];
}

// The program cut into runs of operations of one stage and micro-batch, one after the other.
// Returns for each operation the number of its run. A message that stands between operations of
// other micro-batches belongs to their run, and passes that are merged are one.
OpVector<int32_t> find_runs(const Program& program) {
  const auto same = [&](int32_t a, int32_t b) {
    const Place& x = program.op(a).place;
    const Place& y = program.op(b).place;
    return x.micro_batch == y.micro_batch && x.chunk == y.chunk;
  };
  OpVector<int32_t> run(program.op_count());
  // The next operation that is no communication, of all that follow.
  OpVector<int32_t> next(run.size());
  int32_t computing = program.op_count();
  for (int32_t index = program.op_count() - 1; index >= 0; --index) {
    if (program.op(index).place.queue != Queue::communication) computing = index;
    next[index] = computing;
  }
  int32_t number = 0;
  int32_t member = 0;  // an operation whose place is that of the run
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const int32_t following = next[index];
    const bool is_guest =
        following != index && (following == program.op_count() || !same(index, following));
    if (!is_guest && !same(index, member)) {
      ++number;
      member = index;
    }
    run[index] = number;
  }
  join_interleaved(program, run);
  return run;
}

// Values that other queues than compute touch keep their memory as long as that queue has something
// else to do, within the run.
void reserve_for_queues(const Program& program, IdVector<ValueId, Lifetime>& lifetimes) {
  const IdVector<ValueId, int32_t> until = find_queue_reservations(program);
  const OpVector<int32_t> run = find_runs(program);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    int32_t& last = lifetimes[ValueId{i}].last;
    const int32_t reserved = until[ValueId{i}];
    if (reserved <= last) continue;
    const auto end = std::upper_bound(run.begin() + last, run.begin() + reserved + 1, run[last]);
    last = static_cast<int32_t>(end - run.begin()) - 1;
  }
}

// Values that are stored together.
struct Bundle {
  int32_t first = 0;  // operations
  int32_t last = 0;
  uint64_t bytes = 0;
  std::vector<ValueId> values;
  std::vector<uint64_t> offsets;  // of the values within the bundle
};

// Counts time in the operations at which something of the run begins or ends: what else stands
// between them makes no difference.
void compress_times(std::vector<Block>& blocks) {
  std::vector<int32_t> times;
  for (const Block& block : blocks) {
    times.push_back(block.first);
    times.push_back(block.last);
  }
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto number = [&](int32_t time) {
    return static_cast<int32_t>(std::lower_bound(times.begin(), times.end(), time) - times.begin());
  };
  for (Block& block : blocks) {
    block.first = number(block.first);
    block.last = number(block.last);
  }
}

// Two kinds of bundles of one of the two arenas: the values that live within one run, which reuse
// each other's memory, and those that live from one run into another, the same for all of them.
std::vector<Bundle> bundle_values(const Program& program,
                                  const IdVector<ValueId, Lifetime>& lifetimes, bool on_host) {
  const OpVector<int32_t> run = find_runs(program);
  std::map<std::tuple<int32_t, int32_t, bool>, Bundle> bundles;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Lifetime& lifetime = lifetimes[ValueId{i}];
    const Value& value = program.value(ValueId{i});
    if (!is_transient(value) || is_on_host(value.role) != on_host) continue;
    if (lifetime.root != ValueId{i}) continue;
    const int32_t first_run = run[lifetime.first];
    const int32_t last_run = run[lifetime.last];
    // What weight gradients need is a bundle of its own even where they are not put off: then it is
    // as large as that of other micro-batches.
    const bool of_weights =
        first_run != last_run && program.op(lifetime.last).place.phase == Phase::weight_gradient;
    Bundle& bundle = bundles[{first_run, last_run, of_weights}];
    const bool is_new = bundle.values.empty();
    bundle.first = is_new ? lifetime.first : std::min(bundle.first, lifetime.first);
    bundle.last = is_new ? lifetime.last : std::max(bundle.last, lifetime.last);
    bundle.values.push_back(ValueId{i});
  }
  std::map<std::vector<Block>, Placement> known;
  std::vector<Bundle> list;
  for (auto& [key, bundle] : bundles) {
    const bool within_a_run = std::get<0>(key) == std::get<1>(key);
    std::vector<Block> blocks;
    blocks.reserve(bundle.values.size());
    for (const ValueId id : bundle.values) {
      const Lifetime& lifetime = lifetimes[id];
      const uint64_t bytes = MemoryPlan::aligned(program.value(id).bytes());
      blocks.push_back({lifetime.first, lifetime.last, bytes});
      bundle.offsets.push_back(bundle.bytes);
      if (!within_a_run) bundle.bytes += bytes;
    }
    if (within_a_run) {
      compress_times(blocks);
      auto found = known.find(blocks);
      if (found == known.end()) found = known.emplace(blocks, place_blocks(blocks)).first;
      bundle.offsets = found->second.offsets;
      bundle.bytes = found->second.height;
    }
    list.push_back(std::move(bundle));
  }
  return list;
}

// Memory for bundles of one size that are not live at the same time.
struct Slot {
  uint64_t bytes = 0;
  std::vector<int32_t> bundles;  // one after the other
};

// As many slots of each size as bundles of that size are live at once, whatever the number of
// micro-batches: those of one stage take turns, and so do stages that look alike.
std::vector<Slot> assign_slots(const std::vector<Bundle>& bundles) {
  std::vector<int32_t> order(bundles.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t i) -> const Bundle& { return bundles[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return at(a).first < at(b).first; });
  std::vector<Slot> slots;
  struct Pool {
    std::set<size_t> free;                 // slots
    std::multimap<int32_t, size_t> taken;  // by the last operation
  };
  std::map<uint64_t, Pool> pools;
  for (const int32_t i : order) {
    Pool& pool = pools[at(i).bytes];
    while (!pool.taken.empty() && pool.taken.begin()->first < at(i).first) {
      pool.free.insert(pool.taken.begin()->second);
      pool.taken.erase(pool.taken.begin());
    }
    if (pool.free.empty()) {
      pool.free.insert(slots.size());
      slots.push_back({at(i).bytes, {}});
    }
    const size_t slot = *pool.free.begin();
    pool.free.erase(pool.free.begin());
    pool.taken.emplace(at(i).last, slot);
    slots[slot].bundles.push_back(i);
  }
  return slots;
}

// Is ever something live in both?
bool overlap(const Slot& a, const Slot& b, const std::vector<Bundle>& bundles) {
  size_t i = 0;
  size_t j = 0;
  while (i < a.bundles.size() && j < b.bundles.size()) {
    const Bundle& x = bundles[static_cast<size_t>(a.bundles[i])];
    const Bundle& y = bundles[static_cast<size_t>(b.bundles[j])];
    if (x.last < y.first) {
      ++i;
    } else if (y.last < x.first) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

// Gives slots addresses, the largest first, each the lowest that is free whenever it is used.
// Returns the offset of each bundle.
std::vector<uint64_t> place_slots(std::vector<Slot> slots, const std::vector<Bundle>& bundles) {
  std::stable_sort(slots.begin(), slots.end(),
                   [](const Slot& a, const Slot& b) { return a.bytes > b.bytes; });
  std::vector<uint64_t> offsets(bundles.size());
  struct Placed {
    uint64_t begin;
    size_t slot;
  };
  std::vector<Placed> placed;  // by ascending address
  for (size_t i = 0; i < slots.size(); ++i) {
    uint64_t address = 0;
    for (const Placed& other : placed) {
      if (other.begin + slots[other.slot].bytes <= address) continue;
      if (!overlap(slots[i], slots[other.slot], bundles)) continue;
      if (address + slots[i].bytes <= other.begin) break;
      address = other.begin + slots[other.slot].bytes;
    }
    for (const int32_t bundle : slots[i].bundles) offsets[static_cast<size_t>(bundle)] = address;
    const auto position =
        std::upper_bound(placed.begin(), placed.end(), address,
                         [](uint64_t value, const Placed& other) { return value < other.begin; });
    placed.insert(position, {address, i});
  }
  return offsets;
}

uint64_t& transient_bytes_of(MemoryPlan& plan, bool on_host) {
  return on_host ? plan.host_transient_bytes : plan.transient_bytes;
}

void place_transients(const Program& program, const IdVector<ValueId, Lifetime>& lifetimes,
                      bool on_host, MemoryPlan& plan) {
  const std::vector<Bundle> bundles = bundle_values(program, lifetimes, on_host);
  uint64_t& height = transient_bytes_of(plan, on_host);
  const std::vector<uint64_t> offsets = place_slots(assign_slots(bundles), bundles);
  for (size_t i = 0; i < bundles.size(); ++i) {
    const Bundle& bundle = bundles[i];
    for (size_t j = 0; j < bundle.values.size(); ++j) {
      plan.offset[static_cast<size_t>(bundle.values[j].index)] = offsets[i] + bundle.offsets[j];
    }
    height = std::max(height, offsets[i] + bundle.bytes);
  }
}

void place_transients(const Program& program, const IdVector<ValueId, Lifetime>& lifetimes,
                      MemoryPlan& plan) {
  for (const bool on_host : {false, true}) place_transients(program, lifetimes, on_host, plan);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const ValueId root = lifetimes[ValueId{i}].root;
    if (root.valid() && is_transient(program.value(root))) {
      plan.offset[static_cast<size_t>(i)] = plan.offset[static_cast<size_t>(root.index)];
    }
  }
}

// Bytes of each transient role that are live while each operation runs; fills the plan's
// statistics.
void count_live_bytes(const Program& program, const IdVector<ValueId, Lifetime>& lifetimes,
                      MemoryPlan& plan) {
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<std::array<int64_t, kRoleCount>> change(ops + 1);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Lifetime& lifetime = lifetimes[ValueId{i}];
    const Value& value = program.value(ValueId{i});
    if (!is_transient(value) || lifetime.root != ValueId{i}) continue;
    const auto role = static_cast<size_t>(value.role);
    const auto bytes = static_cast<int64_t>(MemoryPlan::aligned(value.bytes()));
    change[static_cast<size_t>(lifetime.first)][role] += bytes;
    change[static_cast<size_t>(lifetime.last) + 1][role] -= bytes;
  }
  plan.live_bytes.resize(ops);
  std::array<int64_t, kRoleCount> live{};
  std::array<int64_t, kRoleCount> live_at_peak{};
  for (size_t index = 0; index < ops; ++index) {
    int64_t sum = 0;
    for (size_t role = 0; role < kRoleCount; ++role) {
      if (is_on_host(static_cast<Role>(role))) continue;
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
  plan.host_bytes_by_role[static_cast<size_t>(Role::offloaded)] += plan.host_transient_bytes;
}

// Everything but the transient values.
MemoryPlan plan_fixed_parts(const Program& program, int threads, Device device) {
  MemoryPlan plan;
  plan.device = device;
  plan.threads = device == Device::cpu ? threads : 1;
  const StateLayout state(program.state());
  plan.state_bytes = state.bytes;
  plan.host_state_bytes = state.host_bytes;
  plan.bytes_by_role = state.bytes_by_role;
  plan.host_bytes_by_role = state.host_bytes_by_role;
  plan.offset.resize(static_cast<size_t>(program.value_count()), 0);
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (!is_persistent(value.role) || is_state(value.role)) continue;
    plan.offset[static_cast<size_t>(i)] = plan.persistent_bytes;
    plan.persistent_bytes += MemoryPlan::aligned(value.bytes());
    plan.bytes_by_role[static_cast<size_t>(value.role)] += MemoryPlan::aligned(value.bytes());
  }
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const OpView view{program, op};
    if (device == Device::cuda) {
      uint64_t& most = plan.scratch_bytes_of_queue[static_cast<size_t>(op.place.queue)];
      most = std::max(most, cuda_scratch_of(view).bytes());
    } else if (op.spec->scratch_bytes != nullptr) {
      plan.scratch_bytes_per_thread = std::max(plan.scratch_bytes_per_thread,
                                               MemoryPlan::aligned(op.spec->scratch_bytes(view)));
    }
  }
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const Program& program, int threads, Device device) {
  MemoryPlan plan = plan_fixed_parts(program, threads, device);
  IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program, device);
  if (device == Device::cuda) reserve_for_queues(program, lifetimes);
  share_in_place(program, lifetimes);
  place_transients(program, lifetimes, plan);
  count_live_bytes(program, lifetimes, plan);
  return plan;
}

MemoryPlan plan_oracle(const Program& program, int threads, Device device) {
  MemoryPlan plan = plan_fixed_parts(program, threads, device);
  const IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program, device);
  plan.dead_after.resize(static_cast<size_t>(program.op_count()));
  const auto results = program.results();
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    const Lifetime& lifetime = lifetimes[ValueId{i}];
    if (!is_transient(value) || !lifetime.root.valid()) continue;
    uint64_t& arena = transient_bytes_of(plan, is_on_host(value.role));
    plan.offset[static_cast<size_t>(i)] = arena;
    arena += MemoryPlan::aligned(value.bytes());
    if (std::find(results.begin(), results.end(), ValueId{i}) == results.end()) {
      plan.dead_after[static_cast<size_t>(lifetime.last)].push_back(ValueId{i});
    }
  }
  count_live_bytes(program, lifetimes, plan);
  return plan;
}

void verify_memory_plan(const Program& program, const MemoryPlan& plan) {
  IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program, plan.device);
  const auto ops = static_cast<size_t>(program.op_count());
  std::vector<std::vector<ValueId>> begins(ops);
  std::vector<std::vector<ValueId>> ends(ops);
  const auto begin_of = [&](ValueId id) { return plan.offset[static_cast<size_t>(id.index)]; };
  const auto end_of = [&](ValueId id) { return begin_of(id) + program.value(id).bytes(); };
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    const Lifetime& lifetime = lifetimes[ValueId{i}];
    if (!is_transient(value) || !lifetime.root.valid()) continue;
    const uint64_t end = is_on_host(value.role) ? plan.host_transient_bytes : plan.transient_bytes;
    TROUPE_CHECK(plan.offset[static_cast<size_t>(i)] + MemoryPlan::aligned(value.bytes()) <= end,
                 value.name + " lies outside the transient arena");
    if (value.bytes() == 0) continue;  // overlaps nothing
    begins[static_cast<size_t>(lifetime.first)].push_back(ValueId{i});
    ends[static_cast<size_t>(lifetime.last)].push_back(ValueId{i});
  }
  // Values that are live while the current operation runs, by address. They overlap nothing but
  // the operand over which a result is stored, which begins where the result does: whatever a new
  // value overlaps, it overlaps one that begins within it or the nearest that begin before. The
  // arenas of device and host are apart.
  std::array<std::map<std::pair<uint64_t, int32_t>, ValueId>, 2> live_in;
  const auto arena_of = [&](ValueId id) -> auto& {
    return live_in[is_on_host(program.value(id).role) ? 1 : 0];
  };
  for (size_t index = 0; index < ops; ++index) {
    const Op& op = program.op(static_cast<int32_t>(index));
    const OpSpec::InPlace pair = op.spec->in_place;
    const auto check = [&](ValueId id, ValueId other) {
      if (end_of(id) <= begin_of(other) || end_of(other) <= begin_of(id)) return;
      const bool stored_over_operand =
          pair.output >= 0 && program.outputs(op)[static_cast<size_t>(pair.output)] == id &&
          program.inputs(op)[static_cast<size_t>(pair.input)] == other &&
          begin_of(id) == begin_of(other) && lifetimes[other].last == static_cast<int32_t>(index);
      TROUPE_CHECK(stored_over_operand, program.value(id).name + " overlaps " +
                                            program.value(other).name + " at operation " +
                                            std::to_string(index));
    };
    for (const ValueId id : begins[index]) {
      auto& live = arena_of(id);
      const auto behind = live.lower_bound({begin_of(id), 0});
      for (auto next = behind; next != live.end() && next->first.first < end_of(id); ++next) {
        check(id, next->second);
      }
      if (behind != live.begin()) {
        const uint64_t nearest = std::prev(behind)->first.first;
        for (auto before = live.lower_bound({nearest, 0}); before != behind; ++before) {
          check(id, before->second);
        }
      }
      live.emplace(std::pair{begin_of(id), id.index}, id);
    }
    for (const ValueId id : ends[index]) arena_of(id).erase({begin_of(id), id.index});
  }
}

}  // namespace troupe
