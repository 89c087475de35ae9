// The modules of all blocks, by the names that options choose them by (program/module.h).
//
// To add one: its constant in the block's header, a line in modules.cc. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "program/module.h"

namespace troupe {

// Which of its names: &ModuleSpec::recompute or &ModuleSpec::offload.
using ModuleName = const char* ModuleSpec::*;

// The modules of that name; empty: there is none.
ModuleSet modules_named(ModuleName which, std::string_view name);

// All such names: "core_attn, moe_act, ...".
std::string module_names(ModuleName which);

}  // namespace troupe
