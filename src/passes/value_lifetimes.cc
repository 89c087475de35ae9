#include "passes/value_lifetimes.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "passes/memory_layout.h"
#include "passes/queue_events.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Passes whose operations are interleaved are one run: gives the runs that lie between the first
// and the last operation of a forward, or of a backward without its weight gradients, one number.
void join_interleaved(const Program& program, OpVector<int32_t>& run) {
  using Pass = std::tuple<int32_t, int32_t, bool>;    // micro-batch, chunk, forward?
  std::map<Pass, std::pair<int32_t, int32_t>> reach;  // first and last run
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Place& place = program.op(index).place;
    if (place.micro_batch < 0 || is_communication(place.queue) ||
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

}  // namespace

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
    if (!is_communication(program.op(index).place.queue)) computing = index;
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

}  // namespace troupe
