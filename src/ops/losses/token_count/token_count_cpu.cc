#include <algorithm>

#include "ops/losses/token_count/token_count.h"

namespace troupe {
namespace {

template <class A>
void run_token_count(const KernelArguments& args) {
  const A* mask = args.in<A>(0);
  double sum = 0;
  for (int64_t i = 0; i < args.input(0).shape[0]; ++i) sum += static_cast<double>(mask[i]);
  *args.out<A>(0) = static_cast<A>(sum);
}

template <class Count, class Share>
void run_token_share(const KernelArguments& args) {
  double numerator = args.attributes->as<TokenShareAttributes>().numerator;
  if (args.inputs.size() > 1) numerator *= *args.in<int32_t>(1);
  const auto tokens = static_cast<double>(*args.in<Count>(0));
  *args.out<Share>(0) = static_cast<Share>(numerator / std::max(1.0, tokens));
}

void run_token_mean(const KernelArguments& args) {
  *args.out<double>(0) /= std::max(1.0, *args.in<double>(1));
}

}  // namespace

CpuKernel token_share_cpu_kernel(const OpView& op) {
  const bool wide = op.output(0).dtype == DType::f64;
  if (op.input(0).dtype == DType::f64) {
    return wide ? &run_token_share<double, double> : &run_token_share<double, float>;
  }
  return wide ? &run_token_share<float, double> : &run_token_share<float, float>;
}

CpuKernel token_mean_cpu_kernel(const OpView&) {
  return &run_token_mean;
}

CpuKernel token_count_cpu_kernel(const OpView& op) {
  if (op.input(0).dtype == DType::i32) return &run_token_count<int32_t>;
  return op.input(0).dtype == DType::f64 ? &run_token_count<double> : &run_token_count<float>;
}

}  // namespace troupe
