// Operations: what a program does, one after the other.
//
// An Op names its kind (a pointer to the kind's constant OpSpec), carries one attribute struct of
// exactly that kind, and says where it stands in the step. Operands live in the program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "program/rank_group.h"
#include "program/value.h"

namespace troupe {

struct ModuleSpec;
struct OpSpec;

// One trivially copyable struct of the operation kind's own type, by value. Reading it as another
// type aborts.
class Attributes {
 public:
  static constexpr size_t kCapacity = 80;

  Attributes() = default;
  template <class T>
  explicit Attributes(const T& attributes) : type_(&kTag<T>) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kCapacity &&
                  alignof(T) <= alignof(std::max_align_t));
    std::memcpy(bytes_.data(), &attributes, sizeof(T));
  }

  template <class T>
  const T& as() const {
    TROUPE_CHECK(type_ == &kTag<T>, "attributes read as another operation's");
    return *reinterpret_cast<const T*>(bytes_.data());
  }

 private:
  template <class T>
  static constexpr char kTag = 0;

  const void* type_ = nullptr;
  alignas(std::max_align_t) std::array<std::byte, kCapacity> bytes_{};
};

// For operations that have none.
struct NoAttributes {};

enum class Phase : uint8_t {
  forward,
  data_gradient,    // gradients of activations
  weight_gradient,  // gradients of parameters
  recompute,        // a forward operation run again
  optimizer,        // reduction over ranks, norm, clipping, update
};
std::string_view name_of(Phase phase);

// Operations of one queue run in program order; between queues only dependencies order them.
enum class Queue : uint8_t {
  compute,
  copy,           // between device and host
  communication,  // collectives of all groups that have no other
  tokens,         // to the ranks of their experts and back
  network,        // the same between nodes, beside what is under way within them
  pipeline,       // messages between stages
  replicas,       // sums of gradients and gathering of parameters
};
inline constexpr int kQueueCount = static_cast<int>(Queue::replicas) + 1;
constexpr bool is_communication(Queue queue) {
  return queue >= Queue::communication;
}
// All collectives of a group are on one queue, so that they keep their order on all ranks.
Queue queue_of(RankGroup group);
std::string_view name_of(Queue queue);

// Where an operation stands in the step. Plain facts: nothing is derived from names.
struct Place {
  Phase phase = Phase::forward;
  Queue queue = Queue::compute;
  const ModuleSpec* module = nullptr;  // null: embedding, head, loss, and all outside the model
  int16_t layer = -1;                  // decoder layer; -1 outside the layers
  int16_t chunk = 0;                   // virtual pipeline stage
  int16_t round = 0;                   // of a block that works in several, from 1 on; otherwise 0
  int32_t micro_batch = -1;            // -1 outside micro-batches
  int32_t recompute_of = -1;           // the operation of which this is a clone
};

// How many multiprocessors of a GPU an operation takes where others are to run beside it: `count`,
// or all but `count`; 0: all. It decides how fast the operation is and never what it computes:
// kernels that cannot keep to both take all (KernelChoice::multiprocessors).
struct Multiprocessors {
  int16_t count = 0;
  bool spares = false;
};

struct Op {
  const OpSpec* spec = nullptr;
  Attributes attributes;
  uint32_t first_operand = 0;  // into the program's operand array: inputs, then outputs
  uint16_t input_count = 0;
  uint16_t output_count = 0;
  ValueId workspace;  // invalid when the operation needs none
  Place place;
  Multiprocessors multiprocessors = {};
};

// Operand `i` of what a kernel is given as inputs or outputs.
template <class Tensor>
const Tensor& operand_at(std::span<const Tensor> operands, int i) {
  TROUPE_CHECK(i >= 0 && static_cast<size_t>(i) < operands.size(), "an operand that is not there");
  return operands[static_cast<size_t>(i)];
}

}  // namespace troupe
