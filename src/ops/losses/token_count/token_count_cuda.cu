#include "ops/losses/token_count/token_count.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class A>
__global__ void token_count_kernel(const A* mask, A* count, int64_t tokens) {
  __shared__ double shared[32];
  double sum = 0;
  for_row(tokens, [&](int64_t i) { sum += static_cast<double>(mask[i]); });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *count = static_cast<A>(sum);
}

template <class A>
void run_token_count(const CudaKernelArguments& args) {
  launch(args, {1, 1024}, token_count_kernel<A>, args.in<A>(0), args.out<A>(0),
         args.input(0).shape[0]);
}

template <class Count, class Share>
__global__ void token_share_kernel(const Count* tokens, const int32_t* part, Share* share,
                                   double numerator) {
  if (part != nullptr) numerator *= *part;
  *share = static_cast<Share>(numerator / fmax(1.0, static_cast<double>(*tokens)));
}

template <class Count, class Share>
void run_token_share(const CudaKernelArguments& args) {
  const int32_t* part = args.inputs.size() > 1 ? args.in<int32_t>(1) : nullptr;
  launch(args, {1, 1}, token_share_kernel<Count, Share>, args.in<Count>(0), part,
         args.out<Share>(0), args.attributes->as<TokenShareAttributes>().numerator);
}

__global__ void token_mean_kernel(double* sum, const double* tokens) {
  *sum /= fmax(1.0, *tokens);
}

void run_token_mean(const CudaKernelArguments& args) {
  launch(args, {1, 1}, token_mean_kernel, args.out<double>(0), args.in<double>(1));
}

}  // namespace

CudaKernel token_share_cuda_kernel(const OpView& op) {
  const bool wide = op.output(0).dtype == DType::f64;
  if (op.input(0).dtype == DType::f64) {
    return wide ? &run_token_share<double, double> : &run_token_share<double, float>;
  }
  return wide ? &run_token_share<float, double> : &run_token_share<float, float>;
}

CudaKernel token_mean_cuda_kernel(const OpView&) {
  return &run_token_mean;
}

CudaKernel token_count_cuda_kernel(const OpView& op) {
  if (op.input(0).dtype == DType::i32) return &run_token_count<int32_t>;
  return op.input(0).dtype == DType::f64 ? &run_token_count<double> : &run_token_count<float>;
}

}  // namespace troupe
