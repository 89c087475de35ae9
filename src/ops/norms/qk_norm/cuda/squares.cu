#include "ops/norms/qk_norm/qk_norm.h"
#include "program/cuda/device.cuh"

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

// A block for each row. Vectors of one head are taken by a group of lanes each, enough that each
// has one step if 32 suffice: `steps` is how many a head has. The two vectors of a projection
// are taken by the whole block, one after the other. `each(vector, first, stride, sum)` handles the
// steps first, first + stride, ... and sums over all who share the vector.
template <class A, class Each>
__device__ __forceinline__ void for_vectors(const DeviceQkVectors& vectors, int steps, A* shared,
                                            const Each& each) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (vectors.per_head) {
    int lanes = 32;
    while (lanes > 1 && lanes / 2 >= steps) lanes /= 2;
    const int first_lane = thread % 32 / lanes * lanes;
    const uint32_t group = (lanes == 32 ? 0xffffffffU : (1U << lanes) - 1U) << first_lane;
    const auto sum = [=](A value) {
      for (int width = lanes / 2; width > 0; width /= 2) {
        value += __shfl_xor_sync(group, value, width);
      }
      return value;
    };
    for (int i = thread / lanes; i < vectors.count; i += threads / lanes) {
      each(i, thread % lanes, lanes, sum);
    }
  } else {
    for (int i = 0; i < vectors.count; ++i) {
      each(i, thread, threads, [=](A value) { return block_sum(value, shared); });
    }
  }
}

template <class T>
__global__ void qk_squares_kernel(const T* qkv, accumulation_t<T>* squares, LiveRows rows,
                                  int64_t width, DeviceQkVectors vectors) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  for_vectors(vectors, vectors.head_dim, shared,
              [&](int i, int first, int stride, const auto& sum) {
                const T* x = qkv + row * width + vectors.offset(i);
                A total = 0;
                for (int j = first; j < vectors.size(i); j += stride)
                  total += widen(x[j]) * widen(x[j]);
                total = sum(total);
                if (first == 0) squares[row * vectors.count + i] = total;
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

CudaKernel qk_squares_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresCuda>(op.input(0).dtype);
}

CudaKernel qk_squares_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkSquaresGradientCuda>(op.output(0).dtype);
}

}  // namespace troupe
