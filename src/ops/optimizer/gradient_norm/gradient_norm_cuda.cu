#include <algorithm>

#include "ops/optimizer/gradient_norm/gradient_norm.h"
#include "ops/optimizer/gradient_norm/gradient_norm_cpu.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Gradients that are named to one launch: its parameters have 4 KiB.
constexpr int kGradientsPerLaunch = 64;

struct Gradients {
  struct Each {
    const void* data;     // of the first counted element
    int64_t elements;     // that are counted
    int32_t first_chunk;  // among the chunks of this launch
    DType dtype;
  };
  Each each[kGradientsPerLaunch];
  int32_t count;
  NormTerm term;
};

template <class T>
__device__ double sum_of_terms(const T* x, int64_t n, NormTerm term) {
  double sum = 0;
  const auto add = [&](T element) {
    const auto value = static_cast<double>(widen(element));
    sum += term == NormTerm::square ? value * value : (value == 0 ? 1.0 : 0.0);
  };
  constexpr int kPack = Pack<T>::kElements;
  const bool packs =
      reinterpret_cast<uintptr_t>(x) % sizeof(Pack<T>) == 0;  // shards begin anywhere
  const int64_t whole = packs ? n / kPack * kPack : 0;
#pragma unroll 4
  for (int64_t i = int64_t{threadIdx.x} * kPack; i < whole; i += int64_t{blockDim.x} * kPack) {
    const Pack<T> pack = load_pack(x + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) add(pack.values[j]);
  }
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) add(x[i]);
  return sum;
}

// A block for each chunk of a gradient.
__global__ void squared_chunks_kernel(Gradients gradients, double* partial) {
  __shared__ double shared[32];
  const auto chunk = static_cast<int32_t>(blockIdx.x);
  int i = 0;
  while (i + 1 < gradients.count && gradients.each[i + 1].first_chunk <= chunk) ++i;
  const Gradients::Each& gradient = gradients.each[i];
  const int64_t begin = (chunk - gradient.first_chunk) * kNormChunkElements;
  const int64_t left = gradient.elements - begin;
  const int64_t size = left < kNormChunkElements ? left : kNormChunkElements;
  double sum = 0;
  switch (gradient.dtype) {
    case DType::f64:
      sum = sum_of_terms(static_cast<const double*>(gradient.data) + begin, size, gradients.term);
      break;
    case DType::f32:
      sum = sum_of_terms(static_cast<const float*>(gradient.data) + begin, size, gradients.term);
      break;
    case DType::f16:
      sum = sum_of_terms(static_cast<const F16*>(gradient.data) + begin, size, gradients.term);
      break;
    default:
      sum = sum_of_terms(static_cast<const Bf16*>(gradient.data) + begin, size, gradients.term);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[chunk] = sum;
}

__global__ void sum_chunks_kernel(const double* partial, int64_t chunks, double* out) {
  __shared__ double shared[32];
  double sum = 0;
  for_row(chunks, [&](int64_t i) { sum += partial[i]; });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *out = sum;
}

void run_squared_norm(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<SquaredNormAttributes>();
  auto* partial = reinterpret_cast<double*>(args.scratch);
  const auto count = static_cast<int>(args.inputs.size());
  int64_t total = 0;
  for (int first = 0; first < count; first += kGradientsPerLaunch) {
    Gradients gradients{};
    gradients.term = attributes.term;
    int64_t chunks = 0;
    for (int i = first; i < std::min(count, first + kGradientsPerLaunch); ++i) {
      const CudaTensor& input = args.input(i);
      const IndexRange counted = counted_elements(input.shape, attributes);
      if (counted.begin == counted.end) continue;
      Gradients::Each& each = gradients.each[gradients.count++];
      each.data = static_cast<const std::byte*>(input.data) +
                  static_cast<size_t>(counted.begin) * size_of(input.dtype);
      each.elements = counted.end - counted.begin;
      each.first_chunk = static_cast<int32_t>(chunks);
      each.dtype = input.dtype;
      chunks += norm_chunks(counted);
    }
    if (chunks == 0) continue;
    launch(args, {static_cast<unsigned>(chunks), 256}, squared_chunks_kernel, gradients,
           partial + total);
    total += chunks;
  }
  launch(args, {1, 1024}, sum_chunks_kernel, partial, total, args.out<double>(0));
}

// `faults` may be null.
__global__ void clip_coefficient_kernel(const double* squares, const double* faults,
                                        const double* loss_scale, double* norm, double* coefficient,
                                        int32_t* skip, ClipAttributes attributes) {
  const double scale = loss_scale != nullptr ? *loss_scale : 1.0;
  const double value = sqrt(*squares) / scale;
  const bool finite = isfinite(value);
  const double limited = attributes.max_norm / (value + 1e-6);
  *norm = value;
  *coefficient = (finite && attributes.max_norm > 0 && limited < 1.0 ? limited : 1.0) / scale;
  const bool is_void = faults != nullptr && *faults != 0;
  *skip = finite && value <= attributes.skip_norm && !is_void ? 0 : 1;
}

void run_clip_coefficient(const CudaKernelArguments& args) {
  launch(args, {1, 1}, clip_coefficient_kernel, args.in<double>(0), args.in<double>(1),
         args.in<double>(2), args.out<double>(0), args.out<double>(1), args.out<int32_t>(2),
         args.attributes->as<ClipAttributes>());
}

}  // namespace

CudaKernel squared_norm_cuda_kernel(const OpView&) {
  return &run_squared_norm;
}

CudaKernel clip_coefficient_cuda_kernel(const OpView&) {
  return &run_clip_coefficient;
}

}  // namespace troupe
