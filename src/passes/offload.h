// Offload: activations that wait in the host's memory from the forward pass to the backward pass.
//
// Contract: forward operations are not changed. Before gradients (or a clone, see recompute.h) read
// what is to be offloaded, two copies are emitted on the copy queue: `offload`, to the host, and
// `reload`, back into a new value, which is read from there on instead of the original.
// order_copies() then puts each offload after the last use in the forward pass, so that the
// original dies there, and each reload some way ahead of its first reader. Copies change no bit.
//
// What goes to the host are the large floating-point activations that operations of the chosen
// modules read and that their gradients (or clones) read again; of norms also what they computed,
// since the sum that they begin with is what they normalise. Not offloaded is
//   - what the backward of a stage's last layer reads, which follows at once,
//   - what recompute discards; what it keeps may be,
//   - what gradients of modules that are not chosen have read before,
//   - integers, such as routing.
// Megatron's groups, modules of a layer, are what the fraction counts: the first ones of each
// stage's forward are offloaded (docs/memory.md, "Activations on the host").
#pragma once

#include <cstdint>
#include <vector>

#include "base/id_vector.h"
#include "passes/recompute.h"
#include "program/builder.h"

namespace troupe {

struct OffloadOptions {
  bool attention_norm = false;
  bool qkv = false;
  bool core_attention = false;
  bool attention_out = false;
  bool mlp_norm = false;
  bool expert_fc1 = false;
  bool expert_activation = false;
  int64_t least_elements = 1024 * 1024;  // smaller tensors stay; ragged ones count at their bound
  double fraction = 1;                   // of the groups of a stage, the first ones

  bool any() const {
    return attention_norm || qkv || core_attention || attention_out || mlp_norm || expert_fc1 ||
           expert_activation;
  }
};

// What is offloaded of one stage's forward of one micro-batch.
class Offload {
 public:
  // Of operations [first, last). `recompute`: of the same pass, which it must outlive; or null.
  Offload(const Program& program, int32_t first, int32_t last, const OffloadOptions& options,
          const Recompute* recompute);

  // Called before the gradients of operation `op` are emitted, for all operations in descending
  // order, with reader = op; and before clones that they need, with the original as the reader.
  // `stand_in`: by value, what is read instead of it.
  void emit_for(Builder& builder, int32_t op, int32_t reader, IdVector<ValueId, ValueId>& stand_in);

  // All that were emitted, ascending; where nothing turned out to read a reload they are unread.
  const std::vector<int32_t>& copies() const { return copies_; }

 private:
  bool is_candidate(const Program& program, ValueId id) const;
  std::vector<ValueId> candidates_of(const Program& program, const Op& op) const;
  void choose_groups(const Program& program, int32_t last, const OffloadOptions& options);
  void note_reads(const Program& program);
  void take_back_unread(IdVector<ValueId, ValueId>& stand_in);

  struct StandIn {
    ValueId original;
    ValueId reload;
  };

  int32_t first_;
  int32_t last_layer_ = -1;
  int64_t least_elements_;
  const Recompute* recompute_;
  std::vector<bool> is_chosen_;      // by operation of the forward
  int32_t current_op_ = -1;          // whose gradients are being emitted
  std::vector<StandIn> offered_;     // for these gradients
  IdVector<ValueId, bool> is_read_;  // in the backward
  int32_t noted_ = -1;               // operations up to which is_read_ says so
  std::vector<int32_t> copies_;
};

// A pass (passes/pass_pipeline.h) that puts copies where they belong: each offload right after the
// last operation before it that uses its operand; each reload where the data gradients of the layer
// begin that is worked on before the one that needs it, so that it has a layer's time to arrive.
std::vector<int32_t> order_copies(const Program& program);

}  // namespace troupe
