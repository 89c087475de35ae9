// Quantisation of a value in one operation with what makes it, so that the value is not stored in
// between: rows that permute gathers, and activations and their gradients. The numbers are the
// same. For passes; a thread that has the program.
#pragma once

#include <string>

#include "ops/precision/quantize/quantize.h"
#include "program/rewrite.h"

namespace troupe {

// `made_by`, the operation that makes a value, where it can quantise that, too; otherwise, and for
// -1, it is -1. `is_read`: by others than those that read the codes. Rows are gathered for these
// once more; an activation is not computed twice.
int32_t maker_of_codes(const Program& program, int32_t made_by, bool is_read);

// Quantises the value as it is, or with `maker` as above, which goes unless its results are read by
// operations before this one, or by others than those that read the codes.
Quantized quantize_as_made(Rewrite& rewrite, Builder& builder, ValueId value, int32_t maker,
                           ValueId offsets, ValueId amax, const QuantizeAttributes& attributes,
                           const std::string& name);

}  // namespace troupe
