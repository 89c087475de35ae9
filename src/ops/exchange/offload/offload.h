// Copies between the memory of the device that computes and that of the host, where an activation
// waits for the backward pass (passes/offload.h). On the CPU both are the same kind of memory.
//
// Kinds
//   offload (x) -> host    the elements of x, in the host's memory (Role::offloaded)
//   reload (host) -> y     the same elements, where programs compute
// x is any float activation; all three have its shape, dtype and row count. Both are on the copy
// queue. Of ragged tensors rows beyond the live count are copied or not. They are emitted for
// gradients to read what the forward pass computed, and have no derivative themselves.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

ValueId offload(Builder& builder, ValueId x, const std::string& name);
ValueId reload(Builder& builder, ValueId host, const std::string& name);

extern const OpSpec kOffload;
extern const OpSpec kReload;

}  // namespace troupe
