#include "passes/overlap.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/id_vector.h"
#include "program/module.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// Does another block, or the end, follow this exchange?
bool ends_block(const Program& program, std::span<const int32_t> order, size_t position) {
  return position + 1 == order.size() || !is_expert_exchange(program.op(order[position + 1]));
}

// Takes the marked operations out and puts those of `after[i]` right after the one at i.
std::vector<int32_t> move_after(std::span<const int32_t> order, const std::vector<bool>& moved,
                                const std::vector<std::vector<int32_t>>& after) {
  std::vector<int32_t> result;
  result.reserve(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    if (!moved[i]) result.push_back(order[i]);
    result.insert(result.end(), after[i].begin(), after[i].end());
  }
  return result;
}

// Forward: dispatch and combination; the first half of the shared expert is issued after the first,
// the rest after the second. Backward the same, with the shared expert's own backward.
std::vector<int32_t> spread_shared_expert(const Program& program, std::span<const int32_t> order) {
  struct Block {
    std::vector<size_t> shared;  // positions
    std::vector<size_t> ends;    // of blocks of exchanges
    double flops = 0;
  };
  // By layer; what is recomputed apart from the rest.
  std::map<std::pair<int16_t, bool>, Block> blocks;
  for (size_t i = 0; i < order.size(); ++i) {
    const Op& op = program.op(order[i]);
    const bool shared = op.place.module != nullptr && op.place.module->runs_beside_exchanges;
    if (!shared && !is_expert_exchange(op)) continue;
    Block& block = blocks[{op.place.layer, op.place.phase == Phase::recompute}];
    if (shared) {
      block.shared.push_back(i);
      block.flops += flops_of(program, op);
    } else if (ends_block(program, order, i)) {
      block.ends.push_back(i);
    }
  }
  std::vector<bool> moved(order.size(), false);
  std::vector<std::vector<int32_t>> after(order.size());
  for (const auto& [place, block] : blocks) {
    if (block.ends.empty()) continue;
    double done = 0;
    for (const size_t i : block.shared) {
      moved[i] = true;
      after[done < block.flops / 2 ? block.ends.front() : block.ends.back()].push_back(order[i]);
      done += flops_of(program, program.op(order[i]));
    }
  }
  return move_after(order, moved, after);
}

std::vector<int32_t> delay_weight_gradients(const Program& program,
                                            std::span<const int32_t> order) {
  std::vector<bool> moved(order.size(), false);
  std::vector<std::vector<int32_t>> after(order.size());
  std::vector<size_t> held;
  for (size_t i = 0; i < order.size(); ++i) {
    const Op& op = program.op(order[i]);
    if (op.place.phase == Phase::weight_gradient) held.push_back(i);
    if (!is_expert_exchange(op) || !ends_block(program, order, i)) continue;
    for (const size_t each : std::exchange(held, {})) {
      moved[each] = true;
      after[i].push_back(order[each]);
    }
  }
  return move_after(order, moved, after);
}

// Cut after every block of exchanges; the last piece is what is left.
std::vector<std::span<const int32_t>> cut_at_exchanges(const Program& program,
                                                       std::span<const int32_t> order) {
  std::vector<std::span<const int32_t>> pieces;
  size_t first = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (!is_expert_exchange(program.op(order[i])) || !ends_block(program, order, i)) continue;
    pieces.push_back(order.subspan(first, i + 1 - first));
    first = i + 1;
  }
  pieces.push_back(order.subspan(first));
  return pieces;
}

// Where in a piece another module or layer begins, in front of its exchanges. Ranks of a group may
// differ by an operation within a module, not in these places.
std::vector<size_t> find_seams(const Program& program, std::span<const int32_t> piece) {
  std::vector<size_t> seams;
  for (size_t i = 1; i < piece.size() && !is_expert_exchange(program.op(piece[i])); ++i) {
    const Place& before = program.op(piece[i - 1]).place;
    const Place& place = program.op(piece[i]).place;
    if (before.layer != place.layer || before.module != place.module) seams.push_back(i);
  }
  return seams;
}

// Cuts the pieces with most seams in two, until there are `count` or nothing is left to be cut.
void cut_further(const Program& program, size_t count,
                 std::vector<std::span<const int32_t>>& pieces) {
  while (pieces.size() < count) {
    size_t longest = 0;
    std::vector<size_t> seams;
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::vector<size_t> found = find_seams(program, pieces[i]);
      if (found.size() <= seams.size()) continue;
      seams = std::move(found);
      longest = i;
    }
    if (seams.empty()) return;
    const auto piece = pieces[longest];
    const size_t middle = seams[seams.size() / 2];
    pieces[longest] = piece.first(middle);
    pieces.insert(pieces.begin() + static_cast<int64_t>(longest) + 1, piece.subspan(middle));
  }
}

// What an operation reads and writes: each value with the number of times that it has been written
// by then. Two orders are equal for an operation that sees the same.
class Versions {
 public:
  explicit Versions(const Program& program)
      : program_(program), written_(program.value_count(), 0) {}

  std::vector<int32_t> run(int32_t index) {
    const Op& op = program_.op(index);
    std::vector<int32_t> seen;
    const auto note = [&](ValueId id) {
      if (!id.valid()) return;
      seen.push_back(written_[id]);
      const RowCount& rows = program_.value(id).rows;
      if (rows.valid()) seen.push_back(written_[rows.counter]);
    };
    for (const ValueId input : program_.inputs(op)) note(input);
    for (const ValueId output : program_.outputs(op)) {
      seen.push_back(written_[output]++);
    }
    return seen;
  }

 private:
  const Program& program_;
  IdVector<ValueId, int32_t> written_;
};

}  // namespace

bool is_expert_exchange(const Op& op) {
  return op.place.module != nullptr && op.place.module->exchanges_tokens &&
         op.spec->group != nullptr && exchanges_tokens(op.spec->group(op.attributes));
}

std::vector<int32_t> operations_beside(const Program& program, int32_t index) {
  std::vector<int32_t> beside;
  std::set<int32_t> results;
  const auto is_result = [&](ValueId id) {
    return id.valid() &&
           (results.contains(id.index) || results.contains(program.value(id).rows.counter.index));
  };
  for (int32_t other = index; other < program.op_count(); ++other) {
    const Op& op = program.op(other);
    const auto inputs = program.inputs(op);
    const bool needs = other == index || std::any_of(inputs.begin(), inputs.end(), is_result);
    const bool collective = is_communication(op.place.queue);
    if (needs && !collective) break;
    if (!collective) beside.push_back(other);
    if (!needs) continue;
    for (const ValueId output : program.outputs(op)) results.insert(output.index);
  }
  return beside;
}

std::vector<int32_t> leave_multiprocessors(Program& program, int32_t count) {
  const auto left = static_cast<int16_t>(count);
  std::vector<int32_t> order;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    order.push_back(index);
    if (!is_expert_exchange(program.op(index))) continue;
    program.set_multiprocessors(index, {.count = left, .spares = false});
    for (const int32_t other : operations_beside(program, index)) {
      if (product_flops_of(program, program.op(other)) == 0) continue;
      program.set_multiprocessors(other, {.count = left, .spares = true});
    }
  }
  return order;
}

std::vector<int32_t> overlap_within_pass(const Program& program, std::span<const int32_t> order,
                                         const OverlapOptions& options) {
  std::vector<int32_t> result(order.begin(), order.end());
  if (options.shared_expert) result = spread_shared_expert(program, result);
  if (options.delay_weight_gradients) result = delay_weight_gradients(program, result);
  return result;
}

std::vector<int32_t> merge_at_exchanges(const Program& program, std::span<const int32_t> forward,
                                        std::span<const int32_t> backward) {
  auto forward_pieces = cut_at_exchanges(program, forward);
  auto backward_pieces = cut_at_exchanges(program, backward);
  cut_further(program, backward_pieces.size(), forward_pieces);
  cut_further(program, forward_pieces.size(), backward_pieces);
  std::vector<int32_t> order;
  order.reserve(forward.size() + backward.size());
  for (size_t i = 0; i < std::max(forward_pieces.size(), backward_pieces.size()); ++i) {
    for (const auto& pieces : {backward_pieces, forward_pieces}) {
      if (i < pieces.size()) order.insert(order.end(), pieces[i].begin(), pieces[i].end());
    }
  }
  return order;
}

void verify_order(const Program& program, std::span<const int32_t> order) {
  const auto name = [&](int32_t index) {
    return "operation " + std::to_string(index) + " (" + program.op(index).spec->name + ")";
  };
  OpVector<std::vector<int32_t>> expected(program.op_count());
  Versions before(program);
  for (int32_t i = 0; i < program.op_count(); ++i) expected[i] = before.run(i);
  OpVector<bool> seen(program.op_count(), false);
  Versions after(program);
  int32_t last_message = -1;
  for (const int32_t index : order) {
    TROUPE_CHECK(index >= 0 && index < program.op_count() && !seen[index],
                 "an order names each operation once: " + std::to_string(index));
    seen[index] = true;
    TROUPE_CHECK(after.run(index) == expected[index],
                 name(index) + " was moved across an operation that it depends on");
    if (!message_use(program.op(index))) continue;
    TROUPE_CHECK(last_message < index,
                 name(index) + " was moved across another message of the pipeline");
    last_message = index;
  }
}

}  // namespace troupe
