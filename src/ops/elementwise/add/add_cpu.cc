#include "ops/cpu/vector.h"
#include "ops/elementwise/add/add.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kAddGrain = 32768;

template <class T>
struct AddKernel {
  static void run(const KernelArguments& args) {
    const T* a = args.in<T>(0);
    const T* b = args.in<T>(1);
    T* y = args.out<T>(0);
    const int64_t elements = args.input(0).live_elements();
    args.pool->parallel_ranges(elements, kAddGrain, [=](int64_t begin, int64_t end, int) {
      TROUPE_INDEPENDENT
      for (int64_t i = begin; i < end; ++i) y[i] = T(widen(a[i]) + widen(b[i]));
    });
  }
};

}  // namespace

CpuKernel add_cpu_kernel(const OpView& op) {
  return select_float_kernel<AddKernel>(op.output(0).dtype);
}

}  // namespace troupe
