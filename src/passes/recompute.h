// Recompute: forward operations run again in the backward pass, so that what they computed need not
// be kept until then.
//
// Contract: forward operations are not changed. What is computed again is cloned operations of
// phase `recompute`, each with the number of its original (Place::recompute_of), before the first
// gradient operation that may read their results; gradient operations read the clones' results
// instead of the originals', which then die in the forward pass. Clones read the values that the
// originals read, or their clones, and random numbers are keyed by elements: they compute the same
// bits. Nothing that changes state or metrics is cloned. Clones that turn out not to be needed are
// left out (unused()); that, too, depends on nothing but the operations, so ranks that share a
// program keep the same collectives.
//
// What is computed again and what is kept (docs/memory.md, "Recompute"):
//   full          all of a group of layers; kept: what enters the group, which is the residual
//                 stream and the branch that is still to be added to it
//   core_attention, mlp, moe, shared_experts
//                 all of the module; kept: its inputs, and its outputs where others read them
//   parameters that are sharded (StateSharding::parameters)
//                 always: a layer's are gathered again where gradients read them
//   norms, expert_activation
//                 the module's outputs, too: kept are its inputs alone. Of norms with an addition
//                 these are the stream and the branch; sums that other layers read are kept
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/id_vector.h"
#include "program/builder.h"

namespace troupe {

struct RecomputeOptions {
  enum class Granularity : uint8_t { none, selective, full };
  enum class Method : uint8_t {
    uniform,  // groups of `layers` layers
    block,    // each of the first `layers` layers of a stage; nothing of its other layers
  };
  Granularity granularity = Granularity::none;
  // full
  Method method = Method::uniform;
  int32_t layers = 1;
  // selective
  bool core_attention = false;
  bool expert_activation = false;
  bool norms = false;
  bool mlp = false;
  bool moe = false;  // router, dispatch, experts, combination, shared expert
  bool shared_experts = false;

  bool any() const { return granularity != Granularity::none; }
};

// Called before a clone of operation `op` is emitted. It may emit operations, and say what is to be
// read instead of a value.
using BeforeClone = std::function<void(int32_t op, IdVector<ValueId, ValueId>& stand_in)>;

// What is computed again of one stage's forward of one micro-batch.
class Recompute {
 public:
  // Of operations [first, last); later ones may read their results, too.
  Recompute(const Program& program, int32_t first, int32_t last, const RecomputeOptions& options);

  // Called before the gradients of operation `op` are emitted, for all operations in descending
  // order: emits the clones that these may read. `stand_in`: by value, what is read instead of it;
  // clones read that, too.
  void emit_for(Builder& builder, int32_t op, IdVector<ValueId, ValueId>& stand_in,
                const BeforeClone& before_clone = {});

  // Is the value computed again, and not kept?
  bool discards(ValueId id) const { return region_of(id) >= 0; }

  // All that were emitted, ascending; some may be unread.
  const std::vector<int32_t>& clones() const { return clones_; }

 private:
  // What is computed again together.
  struct Region {
    std::vector<int32_t> ops;  // ascending
    bool is_emitted = false;
  };

  void find_regions(const Program& program, int32_t first, int32_t last,
                    const RecomputeOptions& options);
  void find_discarded(const Program& program, int32_t first, const RecomputeOptions& options);
  int32_t region_of(ValueId id) const;
  void emit(Builder& builder, Region& region, IdVector<ValueId, ValueId>& stand_in,
            const BeforeClone& before_clone);

  std::vector<Region> regions_;
  IdVector<ValueId, int32_t> region_of_;  // in whose clones it has a stand-in; -1: it is kept
  std::vector<int32_t> clones_;
};

// Called when all gradients have been emitted: those of the operations (ascending) whose results
// nothing reads but others of that kind.
std::vector<int32_t> find_unread(const Program& program, std::span<const int32_t> operations);

}  // namespace troupe
