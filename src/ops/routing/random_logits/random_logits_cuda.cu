#include "ops/cuda/random.cuh"
#include "ops/routing/random_logits/random_logits.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

__device__ double to_unit_interval(uint32_t high, uint32_t low) {
  const uint64_t word = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

// random_normal() of base/random.h.
__device__ double device_normal(uint64_t seed, RandomStream stream, uint32_t substream,
                                uint64_t index) {
  const RandomWords drawn = device_random_words(seed, stream, substream, index);
  const double u = 1.0 - to_unit_interval(drawn.words[0], drawn.words[1]);  // in (0, 1]
  const double v = to_unit_interval(drawn.words[2], drawn.words[3]);
  return sqrt(-2.0 * log(u)) * cos(2.0 * 3.14159265358979323846 * v);
}

__device__ double device_bias(const RandomLogitsAttributes& attributes, uint64_t step,
                              uint64_t expert) {
  const uint64_t seed = attributes.bias < 0
                            ? attributes.seed
                            : device_step_seed(attributes.seed, RandomStream::logit_bias,
                                               attributes.bias_substream, step);
  return fabs(attributes.bias) *
         device_normal(seed, RandomStream::logit_bias, attributes.bias_substream, expert);
}

template <class T>
__global__ void random_logits_kernel(T* out, int64_t elements, int64_t width, const int64_t* step,
                                     RandomLogitsAttributes attributes) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const uint64_t seed = device_step_seed(attributes.seed, RandomStream::random_logits,
                                         attributes.substream, static_cast<uint64_t>(*step));
  double value = device_normal(seed, RandomStream::random_logits, attributes.substream,
                               whole_element(attributes.origin, width, i));
  if (attributes.bias != 0) {
    value +=
        device_bias(attributes, static_cast<uint64_t>(*step), static_cast<uint64_t>(i % width));
  }
  out[i] = static_cast<T>(value);
}

template <class T>
void run_random_logits(const CudaKernelArguments& args) {
  const Shape& shape = args.output(0).shape;
  launch(args, {static_cast<unsigned>(ceil_divide(shape.elements(), 256)), 256},
         random_logits_kernel<T>, args.out<T>(0), shape.elements(), shape.row_elements(),
         args.in<int64_t>(1), args.attributes->as<RandomLogitsAttributes>());
}

}  // namespace

CudaKernel random_logits_cuda_kernel(const OpView& op) {
  return op.output(0).dtype == DType::f64 ? &run_random_logits<double> : &run_random_logits<float>;
}

}  // namespace troupe
