// For CPU kernels of products of operands in 8 bits: both operands made wide, in the operation's
// workspace.
//
// Functions of kernels; nothing is kept.
#pragma once

#include "program/kernel.h"
#include "program/op_spec.h"

namespace troupe {

// Wide is the accumulation type of the compute dtype.
template <class Wide>
struct WideOperands {
  const Wide* one = nullptr;
  const Wide* other = nullptr;
  const Wide* bias = nullptr;  // null where there is none
};

// The workspace of such a kernel, which itself needs the first `own_bytes`.
uint64_t wide_operands_bytes(const OpView& op, uint64_t own_bytes);

// Inputs 0 and 1 with their scales, inputs 2 and 3; `offsets` and `bias`: the inputs that are
// these, -1 where the kind has none. Instantiated for double and float.
template <class Wide>
WideOperands<Wide> widen_operands(const KernelArguments& args, uint64_t own_bytes, int offsets,
                                  int bias);

// Kernel<Wide, Out>::run for the dtype of the operation's result, or gradient.
template <template <class, class> class Kernel>
CpuKernel select_wide_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &Kernel<double, double>::run;
    case DType::f32:
      return &Kernel<float, float>::run;
    case DType::bf16:
      return &Kernel<float, bf16>::run;
    case DType::f16:
      return &Kernel<float, f16>::run;
    default:
      break;
  }
  TROUPE_CHECK(false, "no product with a result of this dtype");
  return nullptr;
}

}  // namespace troupe
