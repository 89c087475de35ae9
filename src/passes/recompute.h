// Recompute: forward operations run again in the backward pass, so that what they computed need not
// be kept until then.
//
// A pass (passes/pass_pipeline.h). Contract: forward operations are not changed. What is computed
// again is cloned operations of phase `recompute`, each with the number of its original
// (Place::recompute_of), before the first gradient operation that reads their results; gradient
// operations read the clones' results instead of the originals', which then die in the forward
// pass. Clones read the values that the originals read, or their clones, and random numbers are
// keyed by elements: they compute the same bits. Nothing that changes state or metrics is cloned,
// and nothing that no gradient needs. All this depends on nothing but the operations, so ranks that
// share a program keep the same collectives.
//
// What is computed again and what is kept (docs/memory.md, "Recompute"):
//   full          all of a group of layers; kept: what enters the group, which is the residual
//                 stream and the branch that is still to be added to it
//   modules       all of a module with its parts; kept: its inputs, and its outputs where others
//                 read them
//   modules that discard their outputs (ModuleSpec): norms, activations
//                 the outputs, too: kept are the inputs alone. Of norms with an addition these are
//                 the stream and the branch; sums that other layers read are kept
//   blocks that work in rounds (Place::round)
//                 always, each round by itself; kept are the inputs of each
//   what all micro-batches share (codes of weights)
//                 never
//   parameters that are sharded (StateSharding::parameters)
//                 always: a layer's are gathered again where gradients read them
//   copies of experts (OpSpec::is_run_again)
//                 always
#pragma once

#include <cstdint>
#include <vector>

#include "passes/work_segment.h"
#include "program/module.h"
#include "program/program.h"

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
  ModuleSet modules = {};

  bool any() const { return granularity != Granularity::none; }
  bool operator==(const RecomputeOptions&) const = default;
};

// `segments` of the program; they are moved to the order that is returned.
std::vector<int32_t> recompute_activations(Program& program, std::vector<WorkSegment>& segments,
                                           const RecomputeOptions& options);

}  // namespace troupe
