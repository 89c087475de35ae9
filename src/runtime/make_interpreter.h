// Makes the interpreter of a device.
//
// Any thread.
#pragma once

#include <memory>

#include "runtime/interpreter.h"

namespace troupe {

// The interpreter for the device that the plan was made for, on which the state must be, too. It
// borrows all but the plan. On a GPU the pool only helps the ranks to find each other, which they
// do in the first run.
std::unique_ptr<Interpreter> make_interpreter(const Program& program, MemoryPlan plan,
                                              const StateStorage& state, ThreadPool& pool,
                                              const Communicators& communicators = {},
                                              const InterpreterOptions& options = {});

}  // namespace troupe
