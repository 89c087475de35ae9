// Rewrite: changes to a finished program. Operations are inserted before others or taken out, and
// operations read other values than before; what stays, stays in its order.
//
// New operations are appended to the program, where indexes and values of the old ones stay as they
// are, until order() says where each belongs (Program::select_ops). One rewrite belongs to one
// program and one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/id_vector.h"
#include "program/builder.h"

namespace troupe {

// Calls visit(value) for the values that the operation reads, and the counters of their rows.
template <class Visit>
void for_each_read(const Program& program, const Op& op, const Visit& visit) {
  for (const ValueId id : program.inputs(op)) {
    if (!id.valid()) continue;
    visit(id);
    const RowCount& rows = program.value(id).rows;
    if (rows.valid()) visit(rows.counter);
  }
}

class Rewrite {
 public:
  // Borrows the program.
  explicit Rewrite(Program& program)
      : program_(program),
        builder_(program),
        inserted_(program.op_count()),
        removed_(program.op_count(), false),
        needs_reader_(program.op_count(), false),
        stand_in_(program.value_count()) {}

  // What `emit(builder)` emits, at `place`, comes before operation `index`, after what was inserted
  // there earlier. `index` is one of the operations that the program had at the beginning.
  template <class Emit>
  auto insert_before(int32_t index, const Place& place, const Emit& emit) {
    const PlaceScope scope(builder_, place);
    const int32_t first = program_.op_count();
    auto result = emit(builder_);
    for (int32_t i = first; i < program_.op_count(); ++i) inserted_[index].push_back(i);
    return result;
  }

  // Takes out operation `index`, one of those that the program had; nothing may read its results.
  void remove(int32_t index) { removed_[index] = true; }
  // The same, unless something reads its results in the end.
  void remove_unread(int32_t index) { needs_reader_[index] = true; }

  // From now on `stand_in` is to be read in place of `value`, one of those that the program had.
  void replace(ValueId value, ValueId stand_in) { stand_in_[value] = stand_in; }
  // Makes operation `index` do so.
  void read_stand_ins(int32_t index);

  // All operations in their new order, without those inserted ones that nothing reads but others of
  // that kind.
  std::vector<int32_t> order();

  // After order(): where the operations that the program had, or what was inserted before them, are
  // in that order; in the end what was the end.
  const OpVector<int32_t>& new_begins() const { return new_begins_; }

 private:
  Program& program_;
  Builder builder_;
  OpVector<std::vector<int32_t>> inserted_;  // before the operation
  OpVector<bool> removed_;
  OpVector<bool> needs_reader_;
  IdVector<ValueId, ValueId> stand_in_;  // by value; invalid: it is read itself
  OpVector<int32_t> new_begins_;
};

}  // namespace troupe
