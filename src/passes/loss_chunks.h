// A loss in chunks of tokens (TrainingStepOptions::loss_chunk_tokens): each chunk is differentiated
// as soon as its loss is there, so that its logits are gone before the next one's.
//
// Contract: a pass (passes/pass_pipeline.h) that orders. As emitted, the forward of the stage with
// the loss ends with the chunks' logits and losses, and its backward begins with the gradients of
// one chunk after the other; without the pass all logits are live at once. The gradients of the
// head's weight then belong to the forward: where the embedding has the same weight, a schedule
// must not move the gradients of one micro-batch past those of another.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/work_segment.h"
#include "program/program.h"

namespace troupe {

// Puts the gradients of each chunk right after its loss. `segments` of the program; they are moved
// to the order that is returned.
std::vector<int32_t> order_loss_chunks(const Program& program, std::vector<WorkSegment>& segments);

}  // namespace troupe
