#include <type_traits>

#include "ops/optimizer/muon/muon.h"
#include "ops/optimizer/parameter_dtype.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Calls body(i) for the elements i that this thread of the grid has.
template <class Body>
__device__ __forceinline__ void for_elements(int64_t elements, const Body& body) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    body(i);
  }
}

// `update`: nullptr without nesterov. A and G are the types of the momentum and of the gradient.
template <class A, class G>
__global__ void momentum_kernel(const G* __restrict__ gradient, A* __restrict__ momentum,
                                A* __restrict__ update, int64_t elements, const double* coefficient,
                                const int32_t* skip, A weight, A beta) {
  if (*skip != 0) {
    if (update == nullptr) return;
    for_elements(elements, [=](int64_t i) { update[i] = momentum[i]; });
    return;
  }
  const auto clip = static_cast<A>(*coefficient);
  for_elements(elements, [=](int64_t i) {
    const A g = static_cast<A>(widen(gradient[i])) * clip;
    const A m = momentum[i] + weight * (g - momentum[i]);
    momentum[i] = m;
    if (update != nullptr) update[i] = g + beta * (m - g);
  });
}

template <class A, class G>
void run_muon_momentum(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<MuonMomentumAttributes>();
  const int64_t elements = args.output(0).shape.elements();
  launch(args, {blocks_for(args, elements, 256), 256}, momentum_kernel<A, G>,
         args.in<G>(0) + attributes.first, args.out<A>(0),
         attributes.nesterov ? args.out<A>(1) : nullptr, elements, args.in<double>(2),
         args.in<int32_t>(3), static_cast<A>(1 - attributes.beta), static_cast<A>(attributes.beta));
}

// `weights`: the master, or the parameter itself where that has the accumulation type. `parameter`
// may be null where there is a master.
template <class T>
__global__ void update_kernel(const accumulation_t<T>* __restrict__ y, T* parameter,
                              accumulation_t<T>* weights, int64_t elements,
                              const double* learning_rate, const double* weight_decay,
                              const int32_t* skip, double scale, bool decay) {
  using A = accumulation_t<T>;
  if (*skip != 0) return;
  const auto keep = static_cast<A>(1 - *learning_rate * (decay ? *weight_decay : 0.0));
  const auto step_size = static_cast<A>(*learning_rate * scale);
  for_elements(elements, [=](int64_t i) {
    const A weight = weights[i] * keep - step_size * y[i];
    weights[i] = weight;
    if constexpr (!std::is_same_v<T, A>) {
      if (parameter != nullptr) parameter[i] = round_to<T>(weight);
    }
  });
}

template <class T>
struct MuonUpdateCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<MuonUpdateAttributes>();
    const bool has_parameter = args.in<T>(1) != nullptr;
    const int updated = !std::is_same_v<T, A> && has_parameter ? 1 : 0;
    const int64_t elements = args.output(updated).shape.elements();
    launch(args, {blocks_for(args, elements, 256), 256}, update_kernel<T>,
           args.in<A>(0) + attributes.first,
           has_parameter ? args.out<T>(0) + attributes.first : nullptr, args.out<A>(updated),
           elements, args.in<double>(3), args.in<double>(4), args.in<int32_t>(5), attributes.scale,
           attributes.decay);
  }
};

}  // namespace

CudaKernel muon_momentum_cuda_kernel(const OpView& op) {
  if (op.input(1).dtype == DType::f64) return &run_muon_momentum<double, double>;
  return op.input(0).dtype == DType::bf16 ? &run_muon_momentum<float, Bf16>
                                          : &run_muon_momentum<float, float>;
}

CudaKernel muon_update_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<MuonUpdateCuda>(parameter_dtype(op, 1));
}

}  // namespace troupe
