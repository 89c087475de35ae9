#include "ops/cuda/random.cuh"
#include "ops/routing/jitter/jitter.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

template <class T>
__global__ void jitter_kernel(const T* x, T* y, int64_t elements, int64_t width,
                              const int64_t* step, JitterAttributes attributes) {
  using A = accumulation_t<T>;
  const uint64_t seed = device_step_seed(attributes.seed, RandomStream::router_noise,
                                         attributes.substream, static_cast<uint64_t>(*step));
  const A epsilon = static_cast<A>(attributes.epsilon);
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += threads) {
    const uint64_t number = whole_element(attributes.origin, width, i);
    const RandomWords drawn =
        device_random_words(seed, RandomStream::router_noise, attributes.substream, number / 4);
    // A signed word over 2^31 is uniform in [-1, 1).
    const auto word = static_cast<int32_t>(drawn.words[number % 4]);
    y[i] = round_to<T>(widen(x[i]) * (A(1) + epsilon * (static_cast<A>(word) * A(0x1.0p-31))));
  }
}

template <class T>
struct JitterCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    launch(args, {blocks_for(args, shape.elements(), 256), 256}, jitter_kernel<T>, args.in<T>(0),
           args.out<T>(0), shape.elements(), shape.row_elements(), args.in<int64_t>(1),
           args.attributes->as<JitterAttributes>());
  }
};

}  // namespace

CudaKernel jitter_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<JitterCuda>(op.input(0).dtype);
}

}  // namespace troupe
