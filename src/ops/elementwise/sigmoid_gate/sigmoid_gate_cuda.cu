#include "ops/elementwise/sigmoid_gate/sigmoid_gate.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void sigmoid_gate_kernel(const T* x, const T* gate, T* y, int64_t elements) {
  const auto value = [](T a, T g) { return round_to<T>(widen(a) * sigmoid(widen(g))); };
  for_packs<T>(
      elements,
      [=](int64_t i) {
        const Pack<T> a = load_pack(x + i);
        const Pack<T> g = load_pack(gate + i);
        Pack<T> result;
#pragma unroll
        for (int j = 0; j < Pack<T>::kElements; ++j) {
          result.values[j] = value(a.values[j], g.values[j]);
        }
        store_pack(y + i, result);
      },
      [=](int64_t i) { y[i] = value(x[i], gate[i]); });
}

// dx may be dy.
template <class T>
__global__ void sigmoid_gate_gradient_kernel(const T* dy, const T* x, const T* gate, T* dx,
                                             T* d_gate, int64_t elements) {
  using A = accumulation_t<T>;
  const auto differentiate = [](T d, T a, T g, T& da, T& dg) {
    const A s = sigmoid(widen(g));
    da = round_to<T>(widen(d) * s);
    dg = round_to<T>(widen(d) * widen(a) * s * (A(1) - s));
  };
  for_packs<T>(
      elements,
      [=](int64_t i) {
        const Pack<T> d = load_pack(dy + i);
        const Pack<T> a = load_pack(x + i);
        const Pack<T> g = load_pack(gate + i);
        Pack<T> da, dg;
#pragma unroll
        for (int j = 0; j < Pack<T>::kElements; ++j) {
          differentiate(d.values[j], a.values[j], g.values[j], da.values[j], dg.values[j]);
        }
        store_pack(dx + i, da);
        store_pack(d_gate + i, dg);
      },
      [=](int64_t i) {
        T da, dg;
        differentiate(dy[i], x[i], gate[i], da, dg);
        dx[i] = da;
        d_gate[i] = dg;
      });
}

template <class T>
struct SigmoidGateCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t elements = args.input(0).shape.elements();
    launch(args, {blocks_for(args, elements, 256 * Pack<T>::kElements), 256},
           sigmoid_gate_kernel<T>, args.in<T>(0), args.in<T>(1), args.out<T>(0), elements);
  }
};

template <class T>
struct SigmoidGateGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const int64_t elements = args.input(0).shape.elements();
    launch(args, {blocks_for(args, elements, 256 * Pack<T>::kElements), 256},
           sigmoid_gate_gradient_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<T>(2),
           args.out<T>(0), args.out<T>(1), elements);
  }
};

}  // namespace

CudaKernel sigmoid_gate_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<SigmoidGateCuda>(op.input(0).dtype);
}

CudaKernel sigmoid_gate_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<SigmoidGateGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
