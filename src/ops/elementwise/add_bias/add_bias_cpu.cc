#include "ops/cpu/vector.h"
#include "ops/elementwise/add_bias/add_bias.h"
#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct AddBiasKernel {
  static void run(const KernelArguments& args) {
    const T* x = args.in<T>(0);
    const T* bias = args.in<T>(1);
    T* y = args.out<T>(0);
    const int64_t columns = args.input(0).shape[1];
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(columns),
                               [=](int64_t begin, int64_t end, int) {
                                 for (int64_t t = begin; t < end; ++t) {
                                   const T* in = x + t * columns;
                                   T* out = y + t * columns;
                                   TROUPE_INDEPENDENT
                                   for (int64_t n = 0; n < columns; ++n) {
                                     out[n] = T(widen(in[n]) + widen(bias[n]));
                                   }
                                 }
                               });
  }
};

}  // namespace

CpuKernel add_bias_cpu_kernel(const OpView& op) {
  return select_float_kernel<AddBiasKernel>(op.output(0).dtype);
}

}  // namespace troupe
