#include "ops/cpu/vector.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kAccumulateGrain = 32768;

double accumulate_factor(const KernelArguments& args) {
  if (args.input(2).data == nullptr) return 1;
  return args.input(2).dtype == DType::f64 ? *args.in<double>(2)
                                           : static_cast<double>(*args.in<float>(2));
}

template <class Source>
void run_accumulate(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<AccumulateAttributes>();
  const double weight = attributes.weight;
  const bool overwrite = attributes.overwrite;
  const bool largest = attributes.largest;
  const double factor = accumulate_factor(args);
  const Source* source = args.in<Source>(1);
  double* target = args.out<double>(0) + attributes.first;
  args.pool->parallel_ranges(
      args.input(1).shape.elements(), kAccumulateGrain, [=](int64_t begin, int64_t end, int) {
        if (overwrite) {
          TROUPE_INDEPENDENT
          for (int64_t i = begin; i < end; ++i)
            target[i] = weight * static_cast<double>(source[i]) * factor;
        } else if (largest) {
          TROUPE_INDEPENDENT
          for (int64_t i = begin; i < end; ++i) {
            const double term = weight * static_cast<double>(source[i]) * factor;
            target[i] = target[i] < term ? term : target[i];
          }
        } else {
          TROUPE_INDEPENDENT
          for (int64_t i = begin; i < end; ++i)
            target[i] += weight * static_cast<double>(source[i]) * factor;
        }
      });
}

}  // namespace

CpuKernel accumulate_cpu_kernel(const OpView& op) {
  switch (op.input(1).dtype) {
    case DType::f64:
      return &run_accumulate<double>;
    case DType::f32:
      return &run_accumulate<float>;
    case DType::i64:
      return &run_accumulate<int64_t>;
    default:
      return &run_accumulate<int32_t>;
  }
}

}  // namespace troupe
