// Micro-batches of random tokens, for what measures a step rather than trains with it.
//
// Pure functions of their arguments; one thread at a time for an interpreter.
#pragma once

#include <cstdint>

#include "model/forward_pass.h"
#include "runtime/interpreter.h"

namespace troupe {

// Fills the inputs of a micro-batch: tokens and labels drawn evenly from `vocab_size` ids, those of
// the depths of multi-token prediction, too; documents of 512 tokens where there are any; masks in
// which all tokens count. `number`: of the micro-batch in its step. What one holds is the same on
// all ranks that work on it.
void write_random_batch(const Interpreter& interpreter, const BatchValues& batch, int64_t number,
                        int32_t vocab_size);

}  // namespace troupe
