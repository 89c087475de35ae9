#include "passes/communication_order.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "base/id_vector.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// But over the copies of the embedding, which are at several places of the pipeline.
bool sums_gradients(const Program& program, const Op& op) {
  const auto is_gradient = [&](ValueId id) {
    return id.valid() && program.value(id).role == Role::gradient;
  };
  return op.spec->group != nullptr && is_communication(op.place.queue) && op.input_count > 0 &&
         std::ranges::all_of(program.inputs(op), is_gradient) &&
         op.spec->group(op.attributes) != RankGroup::embedding;
}

}  // namespace

bool gathers_parameters(const Op& op) {
  return op.spec->gathers_shards && op.place.micro_batch >= 0;
}

std::vector<int32_t> order_gradient_sums_early(const Program& program) {
  // After each operation that stays, in their order, the sums that follow it.
  OpVector<std::vector<int32_t>> followers(program.op_count());
  OpVector<bool> moves(program.op_count());
  // By value: the operation that stays and last uses it, or is followed by the sum that does.
  IdVector<ValueId, int32_t> last_use(program.value_count(), -1);
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    int32_t place = index;
    if (sums_gradients(program, op)) {
      place = -1;
      for (const ValueId id : program.inputs(op)) {
        place = std::max(place, last_use[id]);
      }
      TROUPE_CHECK(place >= 0, "a gradient is summed that was never written");
      followers[place].push_back(index);
      moves[index] = true;
    }
    for (const ValueId id : program.inputs(op)) {
      if (id.valid()) last_use[id] = place;
    }
    for (const ValueId id : program.outputs(op)) last_use[id] = place;
  }
  std::vector<int32_t> order;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (moves[index]) continue;
    order.push_back(index);
    const std::vector<int32_t>& sums = followers[index];
    order.insert(order.end(), sums.begin(), sums.end());
  }
  return order;
}

std::vector<int32_t> order_gathers_early(const Program& program) {
  // Stretches of one layer's work for one micro-batch, forward or backward.
  struct Stretch {
    std::vector<int32_t> gathers;
    std::vector<int32_t> others;
  };
  const auto work_of = [](const Place& place) {
    return std::tuple(place.layer, place.chunk, place.micro_batch, place.phase == Phase::forward,
                      place.phase == Phase::optimizer);
  };
  std::vector<Stretch> stretches;
  const Place* last = nullptr;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    // A copy belongs to the work that it stands in. So does a sum of gradients that was moved
    // there: of the ranks that share the gathered parameters only some may have it, with other
    // ranks.
    const bool is_guest = op.place.queue == Queue::copy || sums_gradients(program, op);
    const bool continues = last != nullptr && (is_guest || work_of(op.place) == work_of(*last));
    if (!continues) stretches.emplace_back();
    if (!continues || !is_guest) last = &op.place;
    Stretch& own = stretches.back();
    (gathers_parameters(op) ? own.gathers : own.others).push_back(index);
  }
  std::vector<int32_t> order;
  const auto append = [&](const std::vector<int32_t>& ops) {
    order.insert(order.end(), ops.begin(), ops.end());
  };
  // Do they read what is computed there?
  const auto read_from = [&](const std::vector<int32_t>& gathers, const std::vector<int32_t>& ops) {
    return std::ranges::any_of(gathers, [&](int32_t gather) {
      const ValueId shard = program.inputs(program.op(gather))[0];
      return std::ranges::any_of(ops, [&](int32_t index) {
        return std::ranges::count(program.outputs(program.op(index)), shard) > 0;
      });
    });
  };
  bool is_ahead = false;  // the stretch's gathers are issued already
  for (size_t i = 0; i < stretches.size(); ++i) {
    if (!is_ahead) append(stretches[i].gathers);
    is_ahead =
        i + 1 < stretches.size() && !read_from(stretches[i + 1].gathers, stretches[i].others);
    if (is_ahead) append(stretches[i + 1].gathers);
    append(stretches[i].others);
  }
  return order;
}

}  // namespace troupe
