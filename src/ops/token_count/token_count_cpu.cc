#include <algorithm>

#include "ops/token_count/token_count.h"

namespace troupe {
namespace {

template <class A>
void run_token_count(const KernelArguments& args) {
  const A* mask = args.in<A>(0);
  double sum = 0;
  for (int64_t i = 0; i < args.input(0).shape[0]; ++i) sum += static_cast<double>(mask[i]);
  *args.out<A>(0) = static_cast<A>(sum);
}

template <class A>
void run_token_share(const KernelArguments& args) {
  const double numerator = args.attributes->as<TokenShareAttributes>().numerator;
  *args.out<A>(0) = static_cast<A>(numerator / std::max(1.0, static_cast<double>(*args.in<A>(0))));
}

}  // namespace

CpuKernel token_share_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_token_share<double> : &run_token_share<float>;
}

CpuKernel token_count_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_token_count<double> : &run_token_count<float>;
}

}  // namespace troupe
