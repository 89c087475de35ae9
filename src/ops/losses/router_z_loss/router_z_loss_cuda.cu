#include "ops/cuda/router_tokens.cuh"
#include "ops/losses/router_z_loss/router_z_loss.h"

namespace troupe {
namespace {

template <class T>
struct LogSum {
  T largest;
  T total;  // of exp(z_i - largest)
  T log_sum;
  __device__ explicit LogSum(const TokenLogits<T>& logits) : largest(logits.largest()) {
    total = logits.sum([&](int i) { return exp(logits.z[i] - largest); });
    log_sum = largest + log(total);
  }
};

template <class T>
struct SquaredLogSumTerm {
  __device__ double operator()(int64_t, const TokenLogits<T>& logits) const {
    const double log_sum = LogSum<T>(logits).log_sum;
    return log_sum * log_sum;
  }
};

template <class T>
void run_router_z_loss(const CudaKernelArguments& args) {
  const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
  const DeviceTokenMask valid(args, 1);
  const double tokens = valid.mask != nullptr ? 1 : static_cast<double>(args.input(0).shape[0]);
  sum_over_tokens<T>(args, coefficient / tokens, valid, valid.count, SquaredLogSumTerm<T>{});
}

template <class T>
struct ZLossGradient {
  const T* d_loss;
  double factor;
  const int32_t* divisor;  // null: 1
  __device__ void operator()(int64_t, const TokenLogits<T>& logits, T* dz) const {
    const LogSum<T> sums(logits);
    const double divided =
        divisor != nullptr ? factor / fmax(1.0, static_cast<double>(*divisor)) : factor;
    const T scale =
        static_cast<T>(divided * static_cast<double>(*d_loss)) * sums.log_sum / sums.total;
    for (int i = logits.lane; i < logits.experts; i += 32) {
      dz[i] = exp(logits.z[i] - sums.largest) * scale;
    }
  }
};

template <class T>
void run_router_z_loss_gradient(const CudaKernelArguments& args) {
  const double coefficient = args.attributes->as<RouterZLossAttributes>().coefficient;
  const DeviceTokenMask valid(args, 1);
  const double tokens = valid.mask != nullptr ? 1 : static_cast<double>(args.input(0).shape[0]);
  for_each_token<T>(
      args, valid,
      ZLossGradient<T>{args.inputs.back().as<T>(), 2 * coefficient / tokens, valid.count});
}

}  // namespace

CudaKernel router_z_loss_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_router_z_loss<double> : &run_router_z_loss<float>;
}

CudaKernel router_z_loss_gradient_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_router_z_loss_gradient<double>
                                         : &run_router_z_loss_gradient<float>;
}

}  // namespace troupe
