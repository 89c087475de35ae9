// Offload: activations that wait in the host's memory from the forward pass to the backward pass.
//
// Contract: forward operations are not changed. Before gradients (or a clone, see recompute.h) read
// what is to be offloaded, two copies are inserted on the copy queue: `offload`, to the host, and
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

#include "passes/work_segment.h"
#include "program/module.h"
#include "program/program.h"

namespace troupe {

struct OffloadOptions {
  ModuleSet modules = {};
  int64_t least_elements = 1024 * 1024;  // smaller tensors stay; ragged ones count at their bound
  double fraction = 1;                   // of the groups of a stage, the first ones

  bool any() const { return !modules.empty(); }
};

// A pass (passes/pass_pipeline.h) that inserts the copies, each pair before the first operation
// that reads the reload. After recompute, whose clones read what was kept. `segments` of the
// program; they are moved to the order that is returned.
std::vector<int32_t> offload_activations(Program& program, std::vector<WorkSegment>& segments,
                                         const OffloadOptions& options);

// A pass (passes/pass_pipeline.h) that puts copies where they belong: each offload right after the
// last operation before it that uses its operand; each reload where the data gradients of the layer
// begin that is worked on before the one that needs it, so that it has a layer's time to arrive.
std::vector<int32_t> order_copies(const Program& program);

}  // namespace troupe
