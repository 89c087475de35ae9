#include "program/rewrite.h"

#include <algorithm>

namespace troupe {

void Rewrite::read_stand_ins(int32_t index) {
  std::vector<ValueId> reads;
  for_each_read(program_, program_.op(index), [&](ValueId id) { reads.push_back(id); });
  for (const ValueId id : reads) {
    if (stand_in_.has(id) && stand_in_[id].valid()) program_.replace_read(index, id, stand_in_[id]);
  }
}

std::vector<int32_t> Rewrite::order() {
  const int32_t old_count = inserted_.size();
  IdVector<ValueId, bool> is_read(program_.value_count(), false);
  OpVector<bool> stays(program_.op_count(), true);
  // Readers come after what they read, also among the inserted operations.
  const auto visit = [&](int32_t index) {
    const Op& op = program_.op(index);
    const auto outputs = program_.outputs(op);
    // What is changed in place is read by others than the program.
    const auto is_needed = [&](ValueId id) {
      return is_read[id] || is_mutable(program_.value(id).role);
    };
    const bool needs_reader = index >= old_count || needs_reader_[index];
    stays[index] =
        needs_reader ? std::any_of(outputs.begin(), outputs.end(), is_needed) : !removed_[index];
    if (stays[index]) for_each_read(program_, op, [&](ValueId id) { is_read[id] = true; });
  };
  for (int32_t index = 0; index < old_count; ++index) {
    if (!needs_reader_[index]) visit(index);
  }
  for (int32_t index = program_.op_count() - 1; index >= 0; --index) {
    if (index >= old_count || needs_reader_[index]) visit(index);
  }

  std::vector<int32_t> order;
  new_begins_ = OpVector<int32_t>(old_count + 1);
  for (int32_t index = 0; index < old_count; ++index) {
    new_begins_[index] = static_cast<int32_t>(order.size());
    for (const int32_t added : inserted_[index]) {
      if (stays[added]) order.push_back(added);
    }
    if (stays[index]) order.push_back(index);
  }
  new_begins_[old_count] = static_cast<int32_t>(order.size());
  return order;
}

}  // namespace troupe
