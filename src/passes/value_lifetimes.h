// How long the values of a program need their memory: what the memory plan is made from.
//
// Times are operations, in the order of the program. Pure functions.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "base/id_vector.h"
#include "program/program.h"

namespace troupe {

// From the operation that defines a value to the last one that needs it. A value that shares the
// memory of another (its root) has no memory of its own.
struct Lifetime {
  int32_t first = -1;  // -1: no operation uses the value
  int32_t last = -1;
  ValueId root;
};

inline bool is_transient(const Value& value) {
  return !is_persistent(value.role);
}

// On a GPU, without workspaces.
IdVector<ValueId, Lifetime> find_lifetimes(const Program& program, Device device);

// Lets results take the memory of operands that die where the operation's kind allows it.
void share_in_place(const Program& program, IdVector<ValueId, Lifetime>& lifetimes);

// Values that other queues than compute touch keep their memory as long as that queue has something
// else to do, within the run.
void reserve_for_queues(const Program& program, IdVector<ValueId, Lifetime>& lifetimes);

// The program cut into runs of operations of one stage and micro-batch, one after the other.
// Returns for each operation the number of its run. A message that stands between operations of
// other micro-batches belongs to their run, and passes that are merged are one.
OpVector<int32_t> find_runs(const Program& program);

}  // namespace troupe
