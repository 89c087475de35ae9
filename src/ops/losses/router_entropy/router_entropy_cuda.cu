#include "ops/cuda/router_tokens.cuh"
#include "ops/losses/router_entropy/router_entropy.h"

namespace troupe {
namespace {

template <class T>
struct EntropyTerm {
  __device__ double operator()(int64_t, const TokenLogits<T>& logits) const {
    const T largest = logits.largest();
    const T total = logits.sum([&](int i) { return exp(logits.z[i] - largest); });
    const T weighted = logits.sum([&](int i) {
      const T e = exp(logits.z[i] - largest);
      return e > T(0) ? e * (logits.z[i] - largest) : T(0);
    });
    return log(total) - weighted / total;
  }
};

template <class T>
void run_router_entropy(const CudaKernelArguments& args) {
  const DeviceTokenMask valid(args, 1);
  const double tokens = valid.mask != nullptr ? 1 : static_cast<double>(args.input(0).shape[0]);
  sum_over_tokens<T>(args, 1 / tokens, valid, valid.count, EntropyTerm<T>{});
}

}  // namespace

CudaKernel router_entropy_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_router_entropy<double> : &run_router_entropy<float>;
}

}  // namespace troupe
