// Choosing a kernel, of a CPU or a GPU, by the dtype of an operation's numbers.
#pragma once

#include "base/dtype.h"
#include "base/error.h"

namespace troupe {

// Kernel<T>::run for T = double, float, `Bf16` or `F16` according to `dtype`. Pure.
template <template <class> class Kernel, class Bf16, class F16>
auto select_kernel_of(DType dtype) -> decltype(&Kernel<double>::run) {
  switch (dtype) {
    case DType::f64:
      return &Kernel<double>::run;
    case DType::f32:
      return &Kernel<float>::run;
    case DType::bf16:
      return &Kernel<Bf16>::run;
    case DType::f16:
      return &Kernel<F16>::run;
    default:
      break;
  }
  TROUPE_CHECK(false, "no kernel for this dtype");
  return nullptr;
}

}  // namespace troupe
