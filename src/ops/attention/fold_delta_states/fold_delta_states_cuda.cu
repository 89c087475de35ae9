#include "ops/attention/fold_delta_states/delta_ends.h"
#include "ops/attention/fold_delta_states/fold_delta_states.h"
#include "ops/cuda/product.cuh"

namespace troupe {
namespace {

// A block for some columns of the states of one head of one sequence, which do not depend on
// others.
struct FoldPlace {
  int64_t sequence;
  int64_t head;
  int64_t number;  // of the sequence's head
  int64_t column;

  __device__ explicit FoldPlace(const DeltaEndsShape& shape)
      : sequence(blockIdx.x / shape.heads),
        head(blockIdx.x % shape.heads),
        number(blockIdx.x),
        column(int64_t{blockIdx.y} * kTile) {}

  // visit(i, j) for the block's elements of a state.
  template <class Visit>
  __device__ void for_elements(const DeltaEndsShape& shape, const Visit& visit) const {
    for (int64_t at = threadIdx.x; at < shape.key_dim * kTile; at += blockDim.x) {
      const int64_t j = column + at % kTile;
      if (j < shape.value_dim) visit(at / kTile, j);
    }
  }
};

// after = P before + Q, with `end` Q beside P; columns of the block.
template <class A>
__device__ void advance_columns(const DeltaEndsShape& shape, const FoldPlace& place, const A* end,
                                const A* before, A* after) {
  const int64_t n = shape.value_dim;
  for (int64_t row = 0; row < shape.key_dim; row += kTile) {
    multiply_tile<A>(TileOperand<A>{end + n, shape.columns(), false},
                     TileOperand<A>{before, n, false}, shape.key_dim, n, shape.key_dim, row,
                     place.column, [=](int64_t i, int64_t j, A sum) {
                       after[i * n + j] = end[i * shape.columns() + j] + sum;
                     });
  }
  __syncthreads();
}

// `scratch` has two states for each head of each sequence.
template <class A>
__global__ void fold_delta_states_kernel(const A* ends, A* states, A* scratch,
                                         DeltaEndsShape shape) {
  const FoldPlace place(shape);
  const int64_t n = shape.value_dim;
  A* state = scratch + 2 * place.number * shape.state_size();
  A* after = state + shape.state_size();
  place.for_elements(shape, [=](int64_t i, int64_t j) { state[i * n + j] = 0; });
  __syncthreads();
  for (int64_t chunk = 0; chunk <= shape.last(); ++chunk) {
    const int64_t own = shape.state_of(place.sequence, place.head, chunk);
    if (own >= 0) {
      place.for_elements(shape,
                         [=](int64_t i, int64_t j) { states[own + i * n + j] = state[i * n + j]; });
    }
    if (chunk == shape.last()) break;
    advance_columns(shape, place, ends + shape.end_of(place.sequence, place.head, chunk), state,
                    after);
    A* const before = state;
    state = after;
    after = before;
  }
}

// S before each chunk, in `before` [B H_v, chunks, d_k, d_v], and dQ of each.
template <class A>
__global__ void fold_delta_states_values_kernel(const A* d_states, const A* ends, A* before,
                                                A* d_ends, DeltaEndsShape shape) {
  const FoldPlace place(shape);
  const int64_t n = shape.value_dim;
  const int64_t columns = shape.columns();
  const int64_t size = shape.state_size();
  const int64_t last = shape.last();
  const auto end_of = [&](int64_t chunk) {
    return shape.end_of(place.sequence, place.head, chunk);
  };
  before += place.number * shape.count() * size;
  place.for_elements(shape, [=](int64_t i, int64_t j) { before[i * n + j] = 0; });
  __syncthreads();
  for (int64_t chunk = 0; chunk + 1 < last; ++chunk) {
    advance_columns(shape, place, ends + end_of(chunk), before + chunk * size,
                    before + (chunk + 1) * size);
  }
  for (int64_t chunk = last; chunk < shape.count(); ++chunk) {
    A* const to = d_ends + end_of(chunk);
    place.for_elements(shape, [=](int64_t i, int64_t j) { to[i * columns + j] = 0; });
  }
  // dQ of the chunk before is dS of a chunk.
  const A* const from = d_states + shape.state_of(place.sequence, place.head, last);
  A* const latest = d_ends + end_of(last - 1);
  place.for_elements(shape,
                     [=](int64_t i, int64_t j) { latest[i * columns + j] = from[i * n + j]; });
  __syncthreads();
  for (int64_t chunk = last - 1; chunk > 0; --chunk) {
    const int64_t own = shape.state_of(place.sequence, place.head, chunk);
    A* const to = d_ends + end_of(chunk - 1);
    for (int64_t row = 0; row < shape.key_dim; row += kTile) {
      multiply_tile<A>(TileOperand<A>{ends + end_of(chunk) + n, columns, true},
                       TileOperand<A>{d_ends + end_of(chunk), columns, false}, shape.key_dim, n,
                       shape.key_dim, row, place.column, [=](int64_t i, int64_t j, A sum) {
                         to[i * columns + j] = own < 0 ? sum : d_states[own + i * n + j] + sum;
                       });
    }
    __syncthreads();
  }
}

// dP of a chunk, from its dQ and S before it. A block for each tile.
template <class A>
__global__ void fold_delta_states_products_kernel(const A* before, A* d_ends,
                                                  DeltaEndsShape shape) {
  const int64_t tiles = (shape.key_dim + kTile - 1) / kTile;
  const int64_t row = blockIdx.y / tiles * kTile;
  const int64_t column = blockIdx.y % tiles * kTile;
  const int64_t number = blockIdx.x / shape.count();
  const int64_t chunk = blockIdx.x % shape.count();
  const int64_t n = shape.value_dim;
  const int64_t columns = shape.columns();
  A* const d_end = d_ends + shape.end_of(number / shape.heads, number % shape.heads, chunk);
  const A* const state = before + (number * shape.count() + chunk) * shape.state_size();
  const int64_t depth = chunk < shape.last() ? n : 0;  // beyond, zeros
  multiply_tile<A>(TileOperand<A>{d_end, columns, false}, TileOperand<A>{state, n, true},
                   shape.key_dim, shape.key_dim, depth, row, column,
                   [=](int64_t i, int64_t k, A sum) { d_end[i * columns + n + k] = sum; });
}

dim3 fold_blocks(const DeltaEndsShape& shape) {
  return {static_cast<unsigned>(shape.sequences * shape.heads),
          static_cast<unsigned>(ceil_divide(shape.value_dim, kTile))};
}

template <class A>
struct FoldDeltaStatesCuda {
  static void run(const CudaKernelArguments& args) {
    const DeltaEndsShape shape(args.attributes->as<FoldDeltaStatesAttributes>().chunks,
                               args.input(0).shape);
    if (shape.sequences == 0) return;
    launch(args, {fold_blocks(shape), kTileThreads}, fold_delta_states_kernel<A>, args.in<A>(0),
           args.out<A>(0), reinterpret_cast<A*>(args.scratch), shape);
  }
};

template <class A>
struct FoldDeltaStatesGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const DeltaEndsShape shape(args.attributes->as<FoldDeltaStatesAttributes>().chunks,
                               args.input(1).shape);
    if (shape.sequences == 0) return;
    auto* const before = reinterpret_cast<A*>(args.scratch);
    launch(args, {fold_blocks(shape), kTileThreads}, fold_delta_states_values_kernel<A>,
           args.in<A>(0), args.in<A>(1), before, args.out<A>(0), shape);
    const int64_t tiles = ceil_divide(shape.key_dim, kTile);
    launch(args,
           {dim3(static_cast<unsigned>(shape.sequences * shape.heads * shape.count()),
                 static_cast<unsigned>(tiles * tiles)),
            kTileThreads},
           fold_delta_states_products_kernel<A>, static_cast<const A*>(before), args.out<A>(0),
           shape);
  }
};

}  // namespace

CudaKernel fold_delta_states_cuda_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &FoldDeltaStatesCuda<double>::run
                                         : &FoldDeltaStatesCuda<float>::run;
}

CudaKernel fold_delta_states_gradient_cuda_kernel(const OpView& op) {
  return op.input(1).dtype == DType::f64 ? &FoldDeltaStatesGradientCuda<double>::run
                                         : &FoldDeltaStatesGradientCuda<float>::run;
}

}  // namespace troupe
