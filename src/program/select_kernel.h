// Choosing a kernel, of a CPU or a GPU, by the dtype of an operation's numbers.
#pragma once

#include "base/dtype.h"
#include "base/error.h"

namespace troupe {

// Kernel<T>::run for T = double, float, `Bf16` or `F16` according to `dtype`. Pure.
template <template <class> class Kernel, class Bf16, class F16>
auto select_kernel_of(DType dtype) -> decltype(&Kernel<double>::run) {
  if (dtype == DType::f64) return &Kernel<double>::run;
  if (dtype == DType::f32) return &Kernel<float>::run;
  if (dtype == DType::bf16) return &Kernel<Bf16>::run;
  TROUPE_CHECK(dtype == DType::f16, "no kernel for this dtype");
  return &Kernel<F16>::run;
}

}  // namespace troupe
