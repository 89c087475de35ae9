// The part of the pass `precision` that finds the largest element of a whole tensor, or of each
// expert's rows, of which ranks have parts: those of tp_cp, to which one micro-batch belongs; of
// experts that are spread over ep, those of etp.
#pragma once

#include <string>

#include "ops/precision/recipe.h"
#include "parallel/layout.h"

namespace troupe {

// The largest elements of all parts, one rank's after the other's, by those of this one's.
ValueId amax_of_parts(Builder& builder, const Layout& layout, ValueId amax, bool of_experts,
                      const std::string& name);

// The same by the part itself, as it is quantised. Invalid where its own quantisation finds all
// that it needs.
ValueId whole_amax(Builder& builder, const Layout& layout, Fp8Recipe recipe, ValueId value,
                   ValueId offsets, bool of_experts, const QuantizeAttributes& attributes,
                   const std::string& name);

}  // namespace troupe
