// The memory of a StateTable on the CPU: parameters, gradients, optimizer and router state.
// Programs that are built on the same table (training, evaluation, generation) run on the same
// storage.
//
// Owns its memory, which starts as zeros. Not synchronised: one interpreter runs at a time.
#pragma once

#include <memory>

#include "passes/memory_plan.h"
#include "program/kernel.h"
#include "runtime/arena.h"

namespace troupe {

class StateStorage {
 public:
  explicit StateStorage(std::shared_ptr<const StateTable> table);

  const StateTable& table() const { return *table_; }
  std::shared_ptr<const StateTable> shared_table() const { return table_; }
  TensorView view(StateId id) const;
  uint64_t bytes() const { return arena_.bytes(); }

 private:
  std::shared_ptr<const StateTable> table_;
  StateLayout layout_;
  Arena arena_;
};

}  // namespace troupe
