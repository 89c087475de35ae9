#include "ops/cuda/device.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/qk_norm/qk_norm.h"

namespace troupe {
namespace {

// The vectors of a row that are normalised: those of the queries, then those of the keys.
struct DeviceQkVectors {
  template <class Heads>
  explicit DeviceQkVectors(const Heads& attributes)
      : per_head(attributes.scope == QkNormScope::head),
        count(per_head ? attributes.heads + attributes.groups : 2),
        queries(per_head ? attributes.heads : 1),
        head_dim(attributes.head_dim),
        query_elements(attributes.heads * attributes.head_dim),
        elements(query_elements + attributes.groups * attributes.head_dim) {}

  bool per_head;
  int count, queries, head_dim, query_elements, elements;

  __device__ bool is_query(int vector) const { return vector < queries; }
  __device__ int offset(int vector) const {
    return per_head ? vector * head_dim : vector * query_elements;
  }
  __device__ int size(int vector) const {
    if (per_head) return head_dim;
    return is_query(vector) ? query_elements : elements - query_elements;
  }
};

// A block for each row. Vectors of one head are taken by a group of lanes each, so many that each
// has one step of kStep elements if 32 are enough; the two vectors of a projection by the whole
// block, one after the other. `each(vector, begin, stride, sum)` handles the steps at begin,
// begin + stride, ... and sums over all who share the vector.
template <int kStep, class A, class Each>
__device__ __forceinline__ void for_vectors(const DeviceQkVectors& vectors, A* shared,
                                            const Each& each) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (vectors.per_head) {
    int lanes = 32;
    while (lanes > 1 && lanes / 2 * kStep >= vectors.head_dim) lanes /= 2;
    const int first_lane = thread % 32 / lanes * lanes;
    const uint32_t group = (lanes == 32 ? 0xffffffffU : (1U << lanes) - 1U) << first_lane;
    const auto sum = [=](A value) {
      for (int width = lanes / 2; width > 0; width /= 2) {
        value += __shfl_xor_sync(group, value, width);
      }
      return value;
    };
    for (int i = thread / lanes; i < vectors.count; i += threads / lanes) {
      each(i, thread % lanes * kStep, lanes * kStep, sum);
    }
  } else {
    for (int i = 0; i < vectors.count; ++i) {
      each(i, thread * kStep, threads * kStep, [=](A value) { return block_sum(value, shared); });
    }
  }
}

// Whether all vectors of all rows begin and end with packs.
template <class T>
bool are_made_of_packs(const DeviceQkVectors& vectors, int64_t width) {
  return is_made_of_packs<T>(vectors.head_dim) && is_made_of_packs<T>(width);
}

template <class T, int kStep>
__global__ void qk_norm_kernel(const T* qkv, const accumulation_t<T>* gamma_q,
                               const accumulation_t<T>* gamma_k, const accumulation_t<T>* squares,
                               T* y, accumulation_t<T>* rstd, LiveRows rows, int64_t width,
                               DeviceQkVectors vectors, QkNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const T* in = qkv + row * width;
  T* out = y + row * width;
  const A offset = attributes.zero_centered ? A(1) : A(0);
  // First, because nothing waits for it.
  for (int64_t i = vectors.elements + int64_t{threadIdx.x} * kStep; i < width;
       i += int64_t{blockDim.x} * kStep) {
    store_step<T, kStep>(out + i, load_step<T, kStep>(in + i));
  }
  for_vectors<kStep>(vectors, shared, [&](int i, int begin, int stride, const auto& sum) {
    const int at = vectors.offset(i);
    const int n = vectors.size(i);
    A total = 0;
    int64_t terms = n;
    if (squares == nullptr) {
      for (int j = begin; j < n; j += stride) {
        const Pack<T> x = load_step<T, kStep>(in + at + j);
#pragma unroll
        for (int e = 0; e < kStep; ++e) total += widen(x.values[e]) * widen(x.values[e]);
      }
      total = sum(total);
    } else {
      total = squares[row * vectors.count + i];
      terms *= attributes.ranks;
    }
    const A scale = A(1) / sqrt(total / static_cast<A>(terms) + static_cast<A>(attributes.epsilon));
    if (begin == 0) rstd[row * vectors.count + i] = scale;
    const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
    for (int j = begin; j < n; j += stride) {
      Pack<T> x = load_step<T, kStep>(in + at + j);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        x.values[e] = round_to<T>(widen(x.values[e]) * scale * (offset + gamma[j + e]));
      }
      store_step<T, kStep>(out + at + j, x);
    }
  });
}

template <class T>
struct QkNormCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormAttributes>();
    const Shape& shape = args.input(0).shape;
    const DeviceQkVectors vectors(attributes);
    launch(args, {static_cast<unsigned>(shape[0]), 256},
           are_made_of_packs<T>(vectors, shape[1]) ? qk_norm_kernel<T, Pack<T>::kElements>
                                                   : qk_norm_kernel<T, 1>,
           args.in<T>(0), args.in<A>(1), args.in<A>(2), args.in<A>(3), args.out<T>(0),
           args.out<A>(1), LiveRows(args.input(0)), shape[1], vectors, attributes);
  }
};

template <class T, int kStep>
__global__ void qk_norm_gradient_kernel(const T* dy, const T* qkv, const accumulation_t<T>* gamma_q,
                                        const accumulation_t<T>* gamma_k,
                                        const accumulation_t<T>* rstd, T* d_qkv,
                                        accumulation_t<T>* d_squares, LiveRows rows, int64_t width,
                                        DeviceQkVectors vectors, QkNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const A offset = attributes.zero_centered ? A(1) : A(0);
  for_vectors<kStep>(vectors, shared, [&](int i, int begin, int stride, const auto& sum) {
    const int64_t at = row * width + vectors.offset(i);
    const int n = vectors.size(i);
    const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
    const A scale = rstd[row * vectors.count + i];
    A projection = 0;
    for (int j = begin; j < n; j += stride) {
      const Pack<T> d = load_step<T, kStep>(dy + at + j);
      const Pack<T> x = load_step<T, kStep>(qkv + at + j);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        projection += widen(d.values[e]) * (offset + gamma[j + e]) * widen(x.values[e]);
      }
    }
    projection = sum(projection);
    const A cubed = scale * scale * scale * projection;
    if (d_squares != nullptr && begin == 0) {
      d_squares[row * vectors.count + i] =
          -cubed / static_cast<A>(int64_t{2} * n * attributes.ranks);
    }
    const A along = d_squares != nullptr ? A(0) : cubed / static_cast<A>(n);
    for (int j = begin; j < n; j += stride) {
      const Pack<T> d = load_step<T, kStep>(dy + at + j);
      const Pack<T> x = load_step<T, kStep>(qkv + at + j);
      Pack<T> result;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const A g = widen(d.values[e]) * (offset + gamma[j + e]);
        result.values[e] = round_to<T>(scale * g - along * widen(x.values[e]));
      }
      store_step<T, kStep>(d_qkv + at + j, result);
    }
  });
  for (int64_t i = row * width + vectors.elements + int64_t{threadIdx.x} * kStep;
       i < (row + 1) * width; i += int64_t{blockDim.x} * kStep) {
    store_step<T, kStep>(d_qkv + i, load_step<T, kStep>(dy + i));
  }
}

template <class T>
struct QkNormGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormAttributes>();
    const Shape& shape = args.input(0).shape;
    A* d_squares = args.input(5).data != nullptr ? args.out<A>(1) : nullptr;
    const DeviceQkVectors vectors(attributes);
    launch(args, {static_cast<unsigned>(shape[0]), 256},
           are_made_of_packs<T>(vectors, shape[1]) ? qk_norm_gradient_kernel<T, Pack<T>::kElements>
                                                   : qk_norm_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<T>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4),
           args.out<T>(0), d_squares, LiveRows(args.input(0)), shape[1], vectors, attributes);
  }
};

// Its rows are the vectors that share the gain: `count` of every row of the tensors, from `first`.
template <class T, int kStep>
struct QkGainTerm {
  using A = accumulation_t<T>;
  struct Loaded {
    RawStep<T, kStep> d, x;
    A scale;
  };
  const T* dy;
  const T* qkv;
  const A* rstd;
  int64_t width;
  DeviceQkVectors vectors;
  uint32_t first, count;
  __device__ Loaded load(int64_t number, int64_t j) const {
    // All vectors of a tensor can be counted with 32 bits.
    const uint32_t row = static_cast<uint32_t>(number) / count;
    const int vector = static_cast<int>(first + static_cast<uint32_t>(number) % count);
    const int64_t at = row * width + vectors.offset(vector) + j;
    return {load_raw<T, kStep>(dy + at), load_raw<T, kStep>(qkv + at),
            rstd[int64_t{row} * vectors.count + vector]};
  }
  __device__ void add(const Loaded& row, A (&sums)[kStep]) const {
    const Pack<T> d = unpack(row.d);
    const Pack<T> x = unpack(row.x);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      sums[e] += widen(d.values[e]) * widen(x.values[e]) * row.scale;
    }
  }
};

template <class T>
struct QkNormWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormWeightGradientAttributes>();
    const DeviceQkVectors vectors(attributes);
    const bool queries = attributes.first_head == 0;
    const int64_t width = args.input(0).shape[1];
    const int first = queries ? 0 : vectors.queries;
    const int count = queries ? vectors.queries : vectors.count - vectors.queries;
    sum_rows<T, QkGainTerm>(args, {LiveRows(args.input(0)), count}, args.output(0).shape.elements(),
                            are_made_of_packs<T>(vectors, width), args.out<A>(0),
                            attributes.accumulate, args.in<T>(0), args.in<T>(1), args.in<A>(2),
                            width, vectors, static_cast<uint32_t>(first),
                            static_cast<uint32_t>(count));
  }
};

template <class T>
__global__ void qk_squares_kernel(const T* qkv, accumulation_t<T>* squares, LiveRows rows,
                                  int64_t width, DeviceQkVectors vectors) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  for_vectors<1>(vectors, shared, [&](int i, int begin, int stride, const auto& sum) {
    const T* x = qkv + row * width + vectors.offset(i);
    A total = 0;
    for (int j = begin; j < vectors.size(i); j += stride) total += widen(x[j]) * widen(x[j]);
    total = sum(total);
    if (begin == 0) squares[row * vectors.count + i] = total;
  });
}

template <class T>
struct QkSquaresCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    launch(args, {static_cast<unsigned>(shape[0]), 256}, qk_squares_kernel<T>, args.in<T>(0),
           args.out<accumulation_t<T>>(0), LiveRows(args.input(0)), shape[1],
           DeviceQkVectors(args.attributes->as<QkNormAttributes>()));
  }
};

template <class T>
__global__ void qk_squares_gradient_kernel(const accumulation_t<T>* d_squares, const T* qkv,
                                           T* d_qkv, LiveRows rows, int64_t width,
                                           DeviceQkVectors vectors) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  for_row(width, [=](int64_t j) {
    A gradient = 0;
    if (j < vectors.elements) {
      const int64_t i =
          vectors.per_head ? j / vectors.head_dim : (j < vectors.query_elements ? 0 : 1);
      gradient = A(2) * d_squares[row * vectors.count + i] * widen(qkv[row * width + j]);
    }
    d_qkv[row * width + j] = round_to<T>(gradient);
  });
}

template <class T>
struct QkSquaresGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(1).shape;
    launch(args, {static_cast<unsigned>(shape[0]), 256}, qk_squares_gradient_kernel<T>,
           args.in<accumulation_t<T>>(0), args.in<T>(1), args.out<T>(0), LiveRows(args.input(1)),
           shape[1], DeviceQkVectors(args.attributes->as<QkNormAttributes>()));
  }
};

}  // namespace

CudaKernel qk_norm_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormGradientCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormWeightGradientCuda>(op.input(0).dtype);
}

uint64_t qk_norm_weight_gradient_cuda_scratch_bytes(const OpView& op) {
  const auto& attributes = op.attributes<QkNormWeightGradientAttributes>();
  const int64_t vectors = attributes.scope == QkNormScope::head ? attributes.head_count : 1;
  return row_sums_bytes(accumulation_dtype(op.input(0).dtype), op.input(0).shape[0] * vectors,
                        op.output(0).shape.elements());
}

CudaKernel qk_squares_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresCuda>(op.input(0).dtype);
}

CudaKernel qk_squares_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
