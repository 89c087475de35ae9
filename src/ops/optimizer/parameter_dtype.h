// The dtype of the parameter that an update changes, its input `parameter`: bf16 where that is
// absent, as of weights that are kept as master weights alone.
#pragma once

#include "base/dtype.h"

namespace troupe {

// `Operands`: an OpView or an InferContext.
template <class Operands>
DType parameter_dtype(const Operands& op, int parameter) {
  return op.has_input(parameter) ? op.input(parameter).dtype : DType::bf16;
}

}  // namespace troupe
