#include "passes/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "base/id_vector.h"
#include "passes/arena_packing.h"
#include "passes/value_lifetimes.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Values that are stored together.
struct Bundle {
  int32_t first = 0;  // operations
  int32_t last = 0;
  uint64_t bytes = 0;
  std::vector<ValueId> values;
  std::vector<uint64_t> offsets;  // of the values within the bundle
};

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
  std::map<std::vector<MemoryBlock>, Placement> known;
  std::vector<Bundle> list;
  for (auto& [key, bundle] : bundles) {
    const bool within_a_run = std::get<0>(key) == std::get<1>(key);
    std::vector<MemoryBlock> blocks;
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
MemoryPlan plan_fixed_parts(const Program& program, int threads, Device device,
                            const DeviceTraits& gpu) {
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
      if (op.spec->cuda != nullptr) {
        most = std::max(most, MemoryPlan::bytes_of(op.spec->cuda(view, gpu).needs));
      }
    } else if (op.spec->cpu.scratch != nullptr) {
      plan.scratch_bytes_per_thread =
          std::max(plan.scratch_bytes_per_thread, MemoryPlan::aligned(op.spec->cpu.scratch(view)));
    }
  }
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const Program& program, int threads, Device device,
                       const DeviceTraits& gpu) {
  MemoryPlan plan = plan_fixed_parts(program, threads, device, gpu);
  IdVector<ValueId, Lifetime> lifetimes = find_lifetimes(program, device);
  if (device == Device::cuda) reserve_for_queues(program, lifetimes);
  share_in_place(program, lifetimes);
  place_transients(program, lifetimes, plan);
  count_live_bytes(program, lifetimes, plan);
  return plan;
}

MemoryPlan plan_oracle(const Program& program, int threads, Device device,
                       const DeviceTraits& gpu) {
  MemoryPlan plan = plan_fixed_parts(program, threads, device, gpu);
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
