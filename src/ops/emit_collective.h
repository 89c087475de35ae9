// Emits a collective: an operation that other ranks join, on the queue of its group.
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
  const PlaceScope scope(builder);
  builder.place.queue = queue_of(spec.group(attributes));
  return builder.emit(spec, attributes, inputs, name);
}
inline std::vector<ValueId> emit_collective(Builder& builder, const OpSpec& spec,
                                            const Attributes& attributes,
                                            std::initializer_list<ValueId> inputs,
                                            const std::string& name) {
  return emit_collective(builder, spec, attributes,
                         std::span<const ValueId>(inputs.begin(), inputs.size()), name);
}

}  // namespace troupe
