// Stash: rows of experts that wait for the backward pass are packed (ops/experts/row_stash).
//
// Contract: what is kept of experts, tensors as large as the most rows that a layer may get, is
// copied into the stash after its last use in the forward pass, and out of it before gradients (or
// a clone, see recompute.h) read it for the first time, from there on instead of the original. So
// the room of a layer (RunLayout::expert_room) counts once for what one layer works on, and what
// all layers and micro-batches keep counts as many rows as are expected, times a factor. Copies
// change no bit. Where rows do not fit, `lacked` says so and the step is void, as it is where a
// layer's room does not suffice.
//
// Stashed are the ragged tensors, integers apart, that a forward operation computes and the
// backward pass reads, except those of the block that the backward pass begins with: nothing else
// is stashed meanwhile.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace troupe {

struct StashOptions {
  double factor = 0;       // of the pages that are expected to be wanted at a time; 0: no stash
  int64_t page_bytes = 0;  // at least; a page has a multiple of 256

  bool any() const { return factor > 0; }
};

// How many pages the program's stash has; 0: it has none.
int64_t stash_pages(const Program& program);

// A pass (passes/pass_pipeline.h) that adds the stash, once all operations are where they stay,
// except for collectives. `lacked` and `most`: what the copies count in (row_stash.h), which the
// program clears before its forward pass and reads after its backward pass.
std::vector<int32_t> stash_expert_rows(Program& program, const StashOptions& options,
                                       ValueId lacked, ValueId most);

}  // namespace troupe
