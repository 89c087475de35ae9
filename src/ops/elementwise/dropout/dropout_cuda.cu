#include "ops/cuda/random.cuh"
#include "ops/elementwise/dropout/dropout.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void dropout_kernel(const T* x, T* y, LiveRows rows, int64_t width, const int64_t* step,
                               DeviceDropout dropout, RowOrigin origin) {
  using A = accumulation_t<T>;
  const A scale = static_cast<A>(dropout.scale);
  const uint64_t seed = dropout.step_seed(*step);
  const int64_t elements = live_elements(rows, width);
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const bool kept = dropout.keeps(seed, whole_element(origin, width, i));
    y[i] = round_to<T>(kept ? widen(x[i]) * scale : A(0));
  }
}

template <class T>
struct DropoutCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& attributes = args.attributes->as<DropoutAttributes>();
    const Shape& shape = args.input(0).shape;
    launch(args, {blocks_for(args, shape.elements(), 256), 256}, dropout_kernel<T>, args.in<T>(0),
           args.out<T>(0), LiveRows(args.input(0)), shape.row_elements(), args.in<int64_t>(1),
           DeviceDropout(attributes.seed, attributes.substream, attributes.probability),
           attributes.origin);
  }
};

}  // namespace

CudaKernel dropout_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<DropoutCuda>(op.output(0).dtype);
}

}  // namespace troupe
