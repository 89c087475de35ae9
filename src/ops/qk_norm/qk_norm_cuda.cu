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
// has one step if 32 are enough: `steps` is how many a head has. The two vectors of a projection
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

// How the heads of a row turn: elements i and i + pairs by angle i, from 2 pairs on none.
struct DeviceQkRotation {
  template <class Heads>
  explicit DeviceQkRotation(const Heads& attributes)
      : sequence(attributes.sequence), pairs(attributes.rotary_dim / 2) {}

  int sequence, pairs;

  // Cosine and sine of each pair of the row.
  template <class A>
  __device__ const A* angles(const A* table, int64_t row) const {
    return table + row % sequence * (2 * pairs);
  }
};

// Calls pair(at) for the elements at, at + 1, ... of this thread's steps of a vector of n elements
// which turn with those at + pairs, ..., and single(at) for those that do not turn.
template <int kStep, class Pair, class Single>
__device__ __forceinline__ void for_steps(int n, int head_dim, int pairs, int first, int stride,
                                          const Pair& pair, const Single& single) {
  const int pair_steps = pairs / kStep;
  const int rest_steps = (head_dim - 2 * pairs) / kStep;
  const int heads = n / head_dim;
  for (int i = first; i < heads * pair_steps; i += stride) {
    pair(i / pair_steps * head_dim + i % pair_steps * kStep);
  }
  for (int i = first; i < heads * rest_steps; i += stride) {
    single(i / rest_steps * head_dim + 2 * pairs + i % rest_steps * kStep);
  }
}

// Whether all halves of all heads of all rows, and what does not turn, begin and end with packs.
template <class T>
bool are_made_of_packs(const DeviceQkVectors& vectors, const DeviceQkRotation& rotation,
                       int64_t width) {
  return is_made_of_packs<T>(rotation.pairs) && is_made_of_packs<T>(vectors.head_dim) &&
         is_made_of_packs<T>(width);
}

// y may be qkv: what a thread writes it alone has read, and all have read before they sum.
template <class T, int kStep>
__global__ void qk_norm_rope_kernel(const T* qkv, const accumulation_t<T>* gamma_q,
                                    const accumulation_t<T>* gamma_k,
                                    const accumulation_t<T>* table,
                                    const accumulation_t<T>* squares, T* y, accumulation_t<T>* rstd,
                                    LiveRows rows, int64_t width, DeviceQkVectors vectors,
                                    DeviceQkRotation rotation, QkNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const T* in = qkv + row * width;
  T* out = y + row * width;
  const A* angles = rotation.angles(table, row);
  const int pairs = rotation.pairs;
  const A offset = attributes.zero_centered ? A(1) : A(0);
  // First, because nothing waits for it.
  if (out != in) {
    for (int64_t i = vectors.elements + int64_t{threadIdx.x} * kStep; i < width;
         i += int64_t{blockDim.x} * kStep) {
      store_step<T, kStep>(out + i, load_step<T, kStep>(in + i));
    }
  }
  for_vectors(vectors, pairs / kStep, shared, [&](int i, int first, int stride, const auto& sum) {
    const T* x = in + vectors.offset(i);
    T* result = out + vectors.offset(i);
    const int n = vectors.size(i);
    A total = 0;
    int64_t terms = n;
    if (squares == nullptr) {
      const auto add = [&](int at) {
        const Pack<T> pack = load_step<T, kStep>(x + at);
#pragma unroll
        for (int e = 0; e < kStep; ++e) total += widen(pack.values[e]) * widen(pack.values[e]);
      };
      for_steps<kStep>(
          n, vectors.head_dim, pairs, first, stride,
          [&](int at) {
            add(at);
            add(at + pairs);
          },
          add);
      total = sum(total);
    } else {
      total = squares[row * vectors.count + i];
      terms *= attributes.ranks;
    }
    const A scale = A(1) / sqrt(total / static_cast<A>(terms) + static_cast<A>(attributes.epsilon));
    if (first == 0) rstd[row * vectors.count + i] = scale;
    const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
    for_steps<kStep>(
        n, vectors.head_dim, pairs, first, stride,
        [&](int at) {
          Pack<T> low = load_step<T, kStep>(x + at);
          Pack<T> high = load_step<T, kStep>(x + at + pairs);
          const A* angle = angles + 2 * (at % vectors.head_dim);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            const A cosine = angle[2 * e];
            const A sine = angle[2 * e + 1];
            const A a = widen(low.values[e]) * scale * (offset + gamma[at + e]);
            const A b = widen(high.values[e]) * scale * (offset + gamma[at + pairs + e]);
            low.values[e] = round_to<T>(a * cosine - b * sine);
            high.values[e] = round_to<T>(b * cosine + a * sine);
          }
          store_step<T, kStep>(result + at, low);
          store_step<T, kStep>(result + at + pairs, high);
        },
        [&](int at) {
          Pack<T> pack = load_step<T, kStep>(x + at);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            pack.values[e] = round_to<T>(widen(pack.values[e]) * scale * (offset + gamma[at + e]));
          }
          store_step<T, kStep>(result + at, pack);
        });
  });
}

template <class T>
struct QkNormRopeCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormAttributes>();
    const Shape& shape = args.input(0).shape;
    const DeviceQkVectors vectors(attributes);
    const DeviceQkRotation rotation(attributes);
    launch(args, {static_cast<unsigned>(shape[0]), 256},
           are_made_of_packs<T>(vectors, rotation, shape[1])
               ? qk_norm_rope_kernel<T, Pack<T>::kElements>
               : qk_norm_rope_kernel<T, 1>,
           args.in<T>(0), args.in<A>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4),
           args.out<T>(0), args.out<A>(1), LiveRows(args.input(0)), shape[1], vectors, rotation,
           attributes);
  }
};

// A pair of gradients before it turned.
template <class A>
struct TurnedBack {
  __device__ TurnedBack(A low_in, A high_in, A cosine, A sine)
      : low(low_in * cosine + high_in * sine), high(high_in * cosine - low_in * sine) {}
  A low, high;
};

// d_qkv may be dy: what a thread writes it alone has read, and all have read before they sum.
template <class T, int kStep>
__global__ void qk_norm_rope_gradient_kernel(
    const T* dy, const T* qkv, const accumulation_t<T>* gamma_q, const accumulation_t<T>* gamma_k,
    const accumulation_t<T>* table, const accumulation_t<T>* rstd, T* d_qkv,
    accumulation_t<T>* d_squares, LiveRows rows, int64_t width, DeviceQkVectors vectors,
    DeviceQkRotation rotation, QkNormAttributes attributes) {
  using A = accumulation_t<T>;
  __shared__ A shared[32];
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const A* angles = rotation.angles(table, row);
  const int pairs = rotation.pairs;
  const A offset = attributes.zero_centered ? A(1) : A(0);
  for_vectors(vectors, pairs / kStep, shared, [&](int i, int first, int stride, const auto& sum) {
    const int64_t begin = row * width + vectors.offset(i);
    const T* d = dy + begin;
    const T* x = qkv + begin;
    T* result = d_qkv + begin;
    const int n = vectors.size(i);
    const A* gamma = vectors.is_query(i) ? gamma_q : gamma_k;
    const A scale = rstd[row * vectors.count + i];
    A projection = 0;
    for_steps<kStep>(
        n, vectors.head_dim, pairs, first, stride,
        [&](int at) {
          const Pack<T> d_low = load_step<T, kStep>(d + at);
          const Pack<T> d_high = load_step<T, kStep>(d + at + pairs);
          const Pack<T> low = load_step<T, kStep>(x + at);
          const Pack<T> high = load_step<T, kStep>(x + at + pairs);
          const A* angle = angles + 2 * (at % vectors.head_dim);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            const TurnedBack<A> turned(widen(d_low.values[e]), widen(d_high.values[e]),
                                       angle[2 * e], angle[2 * e + 1]);
            projection += turned.low * (offset + gamma[at + e]) * widen(low.values[e]);
            projection += turned.high * (offset + gamma[at + pairs + e]) * widen(high.values[e]);
          }
        },
        [&](int at) {
          const Pack<T> arrived = load_step<T, kStep>(d + at);
          const Pack<T> pack = load_step<T, kStep>(x + at);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            projection +=
                widen(arrived.values[e]) * (offset + gamma[at + e]) * widen(pack.values[e]);
          }
        });
    projection = sum(projection);
    const A cubed = scale * scale * scale * projection;
    if (d_squares != nullptr && first == 0) {
      d_squares[row * vectors.count + i] =
          -cubed / static_cast<A>(int64_t{2} * n * attributes.ranks);
    }
    const A along = d_squares != nullptr ? A(0) : cubed / static_cast<A>(n);
    for_steps<kStep>(
        n, vectors.head_dim, pairs, first, stride,
        [&](int at) {
          Pack<T> d_low = load_step<T, kStep>(d + at);
          Pack<T> d_high = load_step<T, kStep>(d + at + pairs);
          const Pack<T> low = load_step<T, kStep>(x + at);
          const Pack<T> high = load_step<T, kStep>(x + at + pairs);
          const A* angle = angles + 2 * (at % vectors.head_dim);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            const TurnedBack<A> turned(widen(d_low.values[e]), widen(d_high.values[e]),
                                       angle[2 * e], angle[2 * e + 1]);
            const A g_low = turned.low * (offset + gamma[at + e]);
            const A g_high = turned.high * (offset + gamma[at + pairs + e]);
            d_low.values[e] = round_to<T>(scale * g_low - along * widen(low.values[e]));
            d_high.values[e] = round_to<T>(scale * g_high - along * widen(high.values[e]));
          }
          store_step<T, kStep>(result + at, d_low);
          store_step<T, kStep>(result + at + pairs, d_high);
        },
        [&](int at) {
          Pack<T> arrived = load_step<T, kStep>(d + at);
          const Pack<T> pack = load_step<T, kStep>(x + at);
#pragma unroll
          for (int e = 0; e < kStep; ++e) {
            const A g = widen(arrived.values[e]) * (offset + gamma[at + e]);
            arrived.values[e] = round_to<T>(scale * g - along * widen(pack.values[e]));
          }
          store_step<T, kStep>(result + at, arrived);
        });
  });
  if (d_qkv == dy) return;
  for (int64_t i = row * width + vectors.elements + int64_t{threadIdx.x} * kStep;
       i < (row + 1) * width; i += int64_t{blockDim.x} * kStep) {
    store_step<T, kStep>(d_qkv + i, load_step<T, kStep>(dy + i));
  }
}

template <class T>
struct QkNormRopeGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormAttributes>();
    const Shape& shape = args.input(0).shape;
    A* d_squares = args.input(6).data != nullptr ? args.out<A>(1) : nullptr;
    const DeviceQkVectors vectors(attributes);
    const DeviceQkRotation rotation(attributes);
    launch(args, {static_cast<unsigned>(shape[0]), 256},
           are_made_of_packs<T>(vectors, rotation, shape[1])
               ? qk_norm_rope_gradient_kernel<T, Pack<T>::kElements>
               : qk_norm_rope_gradient_kernel<T, 1>,
           args.in<T>(0), args.in<T>(1), args.in<A>(2), args.in<A>(3), args.in<A>(4), args.in<A>(5),
           args.out<T>(0), d_squares, LiveRows(args.input(0)), shape[1], vectors, rotation,
           attributes);
  }
};

// Its rows are the vectors that share the gain: `count` of every row of the tensors, from `first`.
// Each element of a gain reads both of the pair that it turned with.
template <class T, int kStep>
struct QkGainTerm {
  using A = accumulation_t<T>;
  struct Loaded {
    RawStep<T, kStep> d, partner, x;
    A scale;
    const A* angles;  // nullptr: not turned
    A sign;           // of the sine
  };
  const T* dy;
  const T* qkv;
  const A* table;
  const A* rstd;
  int64_t width;
  DeviceQkVectors vectors;
  DeviceQkRotation rotation;
  uint32_t first, count;
  __device__ Loaded load(int64_t number, int64_t j) const {
    // All vectors of a tensor can be counted with 32 bits.
    const uint32_t row = static_cast<uint32_t>(number) / count;
    const int vector = static_cast<int>(first + static_cast<uint32_t>(number) % count);
    const int64_t at = row * width + vectors.offset(vector) + j;
    const int element = static_cast<int>(j) % vectors.head_dim;
    const bool turns = element < 2 * rotation.pairs;
    const bool is_low = element < rotation.pairs;
    const int partner = turns ? (is_low ? rotation.pairs : -rotation.pairs) : 0;
    return {load_raw<T, kStep>(dy + at),
            load_raw<T, kStep>(dy + at + partner),
            load_raw<T, kStep>(qkv + at),
            rstd[int64_t{row} * vectors.count + vector],
            turns ? rotation.angles(table, row) + 2 * (is_low ? element : element - rotation.pairs)
                  : nullptr,
            is_low ? A(1) : A(-1)};
  }
  __device__ void add(const Loaded& row, A (&sums)[kStep]) const {
    const Pack<T> d = unpack(row.d);
    const Pack<T> partner = unpack(row.partner);
    const Pack<T> x = unpack(row.x);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      A turned = widen(d.values[e]);
      if (row.angles != nullptr) {
        const A sine = row.sign * row.angles[2 * e + 1];
        turned = turned * row.angles[2 * e] + widen(partner.values[e]) * sine;
      }
      sums[e] += turned * widen(x.values[e]) * row.scale;
    }
  }
};

template <class T>
struct QkNormRopeWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<QkNormWeightGradientAttributes>();
    const DeviceQkVectors vectors(attributes);
    const DeviceQkRotation rotation(attributes);
    const bool queries = attributes.first_head == 0;
    const int64_t width = args.input(0).shape[1];
    const int first = queries ? 0 : vectors.queries;
    const int count = queries ? vectors.queries : vectors.count - vectors.queries;
    sum_rows<T, QkGainTerm>(args, {LiveRows(args.input(0)), count}, args.output(0).shape.elements(),
                            are_made_of_packs<T>(vectors, rotation, width), args.out<A>(0),
                            attributes.accumulate, args.in<T>(0), args.in<T>(1), args.in<A>(2),
                            args.in<A>(3), width, vectors, rotation, static_cast<uint32_t>(first),
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

CudaKernel qk_norm_rope_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_rope_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeGradientCuda>(op.output(0).dtype);
}

CudaKernel qk_norm_rope_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<QkNormRopeWeightGradientCuda>(op.input(0).dtype);
}

uint64_t qk_norm_rope_weight_gradient_cuda_scratch_bytes(const OpView& op) {
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
