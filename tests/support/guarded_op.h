// Runs one operation on the CPU as an interpreter does, with workspace and scratch memory that end
// where its OpSpec says: what is written beyond them is found.
#pragma once

#include <functional>
#include <string>

#include "base/thread_pool.h"
#include "program/kernel.h"
#include "program/program.h"

namespace troupe::testing {

// Which memory the kernel wrote beyond, "workspace" or "scratch"; empty: none. Not for collectives.
std::string run_guarded(const OpView& op, const std::function<TensorView(ValueId)>& view,
                        ThreadPool& pool);

}  // namespace troupe::testing
