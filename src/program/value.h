// Values: the tensors that a program computes with.
//
// A value is identified by its number in the program. Names are for printing only and decide
// nothing. There are two kinds:
//   - State: parameters, main gradients, optimizer moments, router state. It outlives the step, is
//     declared once in a StateTable that several programs share, and may be changed in place.
//   - Everything else is defined by exactly one operation (inputs: by the host before the run).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace troupe {

struct ValueId {
  int32_t index = -1;
  bool valid() const { return index >= 0; }
  bool operator==(const ValueId&) const = default;
};

struct StateId {
  int32_t index = -1;
  bool valid() const { return index >= 0; }
  bool operator==(const StateId&) const = default;
};

// What a tensor is for. The memory plan reports bytes by role.
enum class Role : uint8_t {
  parameter,      // weights that the forward pass reads            (state)
  gradient,       // main gradients, summed over micro-batches      (state)
  optimizer,      // master weights and moments                     (state)
  router_state,   // expert bias, balancing counters                (state)
  input,          // written by the host before the step: tokens, learning rate
  metric,         // read by the host after the step: losses, counts
  activation,     // everything between
  workspace,      // private memory of one operation
  communication,  // staging of a transfer
  stash,          // activations of experts, packed, until the backward pass (ops/experts/row_stash)
  offloaded,      // an activation in the host's memory, until it is copied back
};
inline constexpr int kRoleCount = static_cast<int>(Role::offloaded) + 1;

std::string_view name_of(Role role);

// State outlives the program; it is addressed by StateId and may be changed in place.
constexpr bool is_state(Role role) {
  return role <= Role::router_state;
}
// Inputs and metrics live as long as the program does.
constexpr bool is_persistent(Role role) {
  return role <= Role::metric;
}
// Values in the host's memory, also where the program runs on a GPU. State says it of each tensor.
constexpr bool is_on_host(Role role) {
  return role == Role::offloaded;
}
// Values that an operation may change in place.
constexpr bool is_mutable(Role role) {
  return is_state(role) || role == Role::metric || role == Role::stash;
}

struct StateTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  Role role = Role::parameter;
  StateId gradient = {};  // of a parameter: its main gradient; invalid where none is needed
  // Of a parameter: the largest elements of what its products read in steps before
  // (ops/precision/amax_history/amax_history.h); invalid where none are kept.
  StateId amax_history = {};
  bool on_host = false;   // programs on a GPU read and write it in the host's memory
  bool is_stored = true;  // else it has no memory, and no finished program reads or writes it

  uint64_t bytes() const {
    return is_stored ? static_cast<uint64_t>(shape.elements()) * size_of(dtype) : 0;
  }
};

// The state of one rank. Filled while the model is declared, constant afterwards; programs hold it
// by shared_ptr<const>.
class StateTable {
 public:
  StateId add(StateTensor tensor);
  const StateTensor& operator[](StateId id) const {
    return tensors_[static_cast<size_t>(id.index)];
  }
  StateTensor& at(StateId id) { return tensors_[static_cast<size_t>(id.index)]; }
  int32_t size() const { return static_cast<int32_t>(tensors_.size()); }

 private:
  std::vector<StateTensor> tensors_;
};

// Where the number of live rows of a ragged tensor is found: element `element` of the i32 tensor
// `counter`, on the device. The first dimension of the tensor's shape is then only a bound, and
// `expected` how many are expected; 0: all of them.
struct RowCount {
  ValueId counter;
  int32_t element = 0;
  int64_t expected = 0;
  bool valid() const { return counter.valid(); }
  bool operator==(const RowCount&) const = default;
};

// Padding contract of ragged tensors: rows at and beyond the live count are unspecified on input,
// never affect any output, and need not be written.
struct Value {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  Role role = Role::activation;
  RowCount rows;       // valid: dimension 0 is ragged
  StateId state = {};  // valid exactly when is_state(role)

  uint64_t bytes() const { return static_cast<uint64_t>(shape.elements()) * size_of(dtype); }
};

}  // namespace troupe
