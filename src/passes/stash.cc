#include "passes/stash.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/experts/row_stash/row_stash.h"
#include "program/rewrite.h"

namespace troupe {
namespace {

constexpr int64_t kPageMultiple = 256;

// A value that waits, and between which operations: it is stashed after the first of them, and
// needed before the second.
struct Kept {
  ValueId value;
  int32_t stashed_after = -1;
  int32_t needed_at = -1;
};

bool is_forward(const Op& op) {
  return op.place.phase == Phase::forward;
}

// By when they are stashed.
std::vector<Kept> find_kept(const Program& program) {
  IdVector<ValueId, Kept> uses(program.value_count());
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const auto use = [&](ValueId id, bool is_result) {
      if (!id.valid()) return;
      const Value& value = program.value(id);
      if (value.role != Role::activation || !is_stashable(value)) return;
      Kept& kept = uses[id];
      if (is_forward(op) && (is_result || kept.value.valid())) {
        kept.value = id;
        kept.stashed_after = index;
      } else if (kept.needed_at < 0) {
        kept.needed_at = index;
      }
    };
    for (const ValueId id : program.inputs(op)) use(id, false);
    for (const ValueId id : program.outputs(op)) use(id, true);
  }
  std::vector<Kept> kept;
  std::copy_if(uses.begin(), uses.end(), std::back_inserter(kept), [](const Kept& each) {
    return each.value.valid() && each.needed_at > each.stashed_after;
  });
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.stashed_after < b.stashed_after; });
  return kept;
}

// Leaves out what waits while nothing else is stashed but by its own block.
void leave_out_innermost(const Program& program, std::vector<Kept>& kept) {
  const auto block_of = [&](const Kept& each) {
    const Place& place = program.op(each.stashed_after).place;
    return std::pair(place.micro_batch, place.layer);
  };
  std::vector<Kept> waiting;
  for (auto each = kept.begin(); each != kept.end(); ++each) {
    const auto other = std::find_if(each, kept.end(), [&](const Kept& later) {
      return later.stashed_after >= each->needed_at || block_of(later) != block_of(*each);
    });
    if (other != kept.end() && other->stashed_after < each->needed_at) waiting.push_back(*each);
  }
  kept = std::move(waiting);
}

int64_t expected_pages(const Value& value, int64_t page_bytes) {
  const int64_t rows = value.rows.expected > 0 ? value.rows.expected : value.shape[0];
  return pages_of(rows * value.shape.row_elements() * static_cast<int64_t>(size_of(value.dtype)),
                  page_bytes);
}

// The largest sum over those that wait at the same time.
int64_t most_expected_pages(const Program& program, const std::vector<Kept>& kept,
                            int64_t page_bytes) {
  OpVector<int64_t> change(program.op_count() + 1, 0);
  for (const Kept& each : kept) {
    const int64_t pages = expected_pages(program.value(each.value), page_bytes);
    change[each.stashed_after + 1] += pages;
    change[each.needed_at + 1] -= pages;
  }
  int64_t most = 0;
  int64_t now = 0;
  for (const int64_t each : change) most = std::max(most, now += each);
  return most;
}

}  // namespace

int64_t stash_pages(const Program& program) {
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    if (op.spec == &kOpenStash) return op.attributes.as<OpenStashAttributes>().pages;
  }
  return 0;
}

std::vector<int32_t> stash_expert_rows(Program& program, const StashOptions& options,
                                       ValueId lacked, ValueId most) {
  const int32_t count = program.op_count();
  Rewrite rewrite(program);
  std::vector<Kept> kept = find_kept(program);
  leave_out_innermost(program, kept);
  if (kept.empty()) return rewrite.order();

  OpenStashAttributes size;
  size.page_bytes = pages_of(options.page_bytes, kPageMultiple) * kPageMultiple;
  size.pages = static_cast<int64_t>(std::ceil(
      options.factor * static_cast<double>(most_expected_pages(program, kept, size.page_bytes))));
  const auto place_of = [&](int32_t index, Phase phase) {
    Place place = program.op(index).place;
    place.recompute_of = -1;
    place.queue = Queue::compute;
    place.phase = phase;
    return place;
  };
  Place place = place_of(kept.front().stashed_after, Phase::forward);
  const Stash stash =
      rewrite.insert_before(kept.front().stashed_after + 1, place,
                            [&](Builder& builder) { return open_stash(builder, size); });
  IdVector<ValueId, ValueId> table(program.value_count());
  for (const Kept& each : kept) {
    place = place_of(each.stashed_after, Phase::forward);
    table[each.value] = rewrite.insert_before(each.stashed_after + 1, place, [&](Builder& builder) {
      return stash_rows(builder, stash, lacked, most, each.value);
    });
  }
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.needed_at < b.needed_at; });
  auto next = kept.begin();
  for (int32_t index = 0; index < count; ++index) {
    for (; next != kept.end() && next->needed_at == index; ++next) {
      place = place_of(index, Phase::data_gradient);
      rewrite.replace(next->value, rewrite.insert_before(index, place, [&](Builder& builder) {
        return unstash_rows(builder, stash, table[next->value], next->value);
      }));
    }
    rewrite.read_stand_ins(index);
  }
  return rewrite.order();
}

}  // namespace troupe
