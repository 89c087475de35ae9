#include "ops/optimizer/accumulate/accumulate.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// A factor on the device; 1 where there is none.
struct DeviceFactor {
  const double* wide;
  const float* narrow;

  __device__ double value() const {
    if (wide != nullptr) return *wide;
    return narrow != nullptr ? static_cast<double>(*narrow) : 1.0;
  }
};

template <class Source>
__global__ void accumulate_kernel(const Source* source, double* target, int64_t elements,
                                  AccumulateAttributes attributes, DeviceFactor factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  // As on the CPU: the products are rounded before the sum.
  const double term =
      __dmul_rn(__dmul_rn(attributes.weight, static_cast<double>(source[i])), factor.value());
  if (attributes.overwrite) {
    target[i] = term;
  } else if (attributes.largest) {
    target[i] = target[i] < term ? term : target[i];
  } else {
    target[i] = __dadd_rn(target[i], term);
  }
}

template <class Source>
void run_accumulate(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<AccumulateAttributes>();
  const int64_t elements = args.input(1).shape.elements();
  const CudaTensor& factor = args.input(2);
  DeviceFactor device_factor{nullptr, nullptr};
  if (factor.data != nullptr && factor.dtype == DType::f64) device_factor.wide = args.in<double>(2);
  if (factor.data != nullptr && factor.dtype == DType::f32)
    device_factor.narrow = args.in<float>(2);
  launch(args, {static_cast<unsigned>(ceil_divide(elements, 256)), 256}, accumulate_kernel<Source>,
         args.in<Source>(1), args.out<double>(0) + attributes.first, elements, attributes,
         device_factor);
}

}  // namespace

CudaKernel accumulate_cuda_kernel(const OpView& op) {
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
