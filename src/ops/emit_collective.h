// Emits a collective: an operation that other ranks join, on the communication queue.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "program/builder.h"

namespace troupe {

// As Builder::emit; the builder's place is the caller's again afterwards.
inline std::vector<ValueId> emit_collective(Builder& builder, const OpSpec& spec,
                                            const Attributes& attributes,
                                            std::span<const ValueId> inputs,
                                            const std::string& name) {
  const Place caller_place = builder.place;
  builder.place.queue = Queue::communication;
  std::vector<ValueId> outputs = builder.emit(spec, attributes, inputs, name);
  builder.place = caller_place;
  return outputs;
}
inline std::vector<ValueId> emit_collective(Builder& builder, const OpSpec& spec,
                                            const Attributes& attributes,
                                            std::initializer_list<ValueId> inputs,
                                            const std::string& name) {
  return emit_collective(builder, spec, attributes,
                         std::span<const ValueId>(inputs.begin(), inputs.size()), name);
}

}  // namespace troupe
