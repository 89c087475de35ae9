#include <algorithm>

#include "ops/elementwise/fill/fill.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kFillGrain = 32768;

template <class T>
void run_fill(const KernelArguments& args) {
  const T value = static_cast<T>(args.attributes->as<FillAttributes>().value);
  T* y = args.out<T>(0);
  args.pool->parallel_ranges(
      args.output(0).shape.elements(), kFillGrain,
      [&](int64_t begin, int64_t end, int) { std::fill(y + begin, y + end, value); });
}

}  // namespace

CpuKernel fill_cpu_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &run_fill<double>;
    case DType::f32:
      return &run_fill<float>;
    case DType::bf16:
      return &run_fill<bf16>;
    case DType::f16:
      return &run_fill<f16>;
    case DType::f8e4m3:  // no number without its scale
    case DType::f8e5m2:
      break;
    case DType::i64:
      return &run_fill<int64_t>;
    case DType::i32:
      return &run_fill<int32_t>;
    case DType::u8:
      return &run_fill<uint8_t>;
  }
  return nullptr;
}

}  // namespace troupe
