// Sums over the rows of a tensor, as gradients of gains and biases are: the counterpart of
// ops/cpu/row_sums.h. The rows are cut into pieces that are summed apart and then added in order,
// so the bits depend on the sizes alone.
//
// What is summed is a term: a template over the element type and kStep, which is a pack's elements
// (device.cuh) or 1. On the GPU, term.load(row, column) returns what the row has for columns column
// ... column + kStep - 1, as it lies in memory, a term::Loaded, and term.add(loaded, sums) adds it
// to kStep numbers. Loads are apart so that several are on their way at once.
#pragma once

#include "ops/row_sum_pieces.h"
#include "program/cuda/raw_step.cuh"

namespace troupe {

inline constexpr int kSumThreads = 256;
inline constexpr int kSumLoads = 4;  // rows of a thread that are on their way at once
inline constexpr int kAddRows = 32;  // pieces that a block adds at a time

// Adds up what the threads of a block with the same threadIdx.x have, in the order of threadIdx.y:
// sum j of those with x is stored as number column(x, j) of `piece`, or not, if that is negative.
// `shared`: room for all of them, used once.
template <int kSums, class A, class Column>
__device__ __forceinline__ void store_piece(const A (&sums)[kSums], A* shared, A* piece,
                                            const Column& column) {
  const auto width = static_cast<int>(blockDim.x);
  const int block_sums = width * kSums;
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    shared[threadIdx.y * block_sums + j * width + threadIdx.x] = sums[j];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); i < block_sums;
       i += kSumThreads) {
    const int64_t to = column(i % width, i / width);
    if (to < 0) continue;
    A sum = shared[i];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * block_sums + i];
    piece[to] = sum;
  }
}

// A block has blockDim.x * kStep columns of a piece, and blockDim.y of its rows at a time.
template <class A, int kStep, class Term>
__global__ void __launch_bounds__(kSumThreads, 4)
    sum_pieces_kernel(Term term, LiveRows rows, int64_t piece_rows, int64_t n, A* partial) {
  __shared__ A shared[kSumThreads * kStep];
  const auto height = static_cast<int64_t>(blockDim.y);
  const int64_t first_column = int64_t{blockIdx.x} * blockDim.x * kStep;
  const int64_t column = first_column + threadIdx.x * kStep;
  const int64_t begin = int64_t{blockIdx.y} * piece_rows;
  const int64_t live = rows.count();
  const int64_t end = begin + piece_rows < live ? begin + piece_rows : live;
  A sums[kStep] = {};
  if (column < n) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kSumLoads * height) {
      // Instead of a row beyond the end, which is not added, the first one is loaded again.
      typename Term::Loaded loaded[kSumLoads];
#pragma unroll
      for (int i = 0; i < kSumLoads; ++i) {
        loaded[i] = term.load(row + i * height < end ? row + i * height : row, column);
      }
#pragma unroll
      for (int i = 0; i < kSumLoads; ++i) {
        if (row + i * height < end) term.add(loaded[i], sums);
      }
    }
  }
  store_piece(sums, shared, partial + int64_t{blockIdx.y} * n, [=](int x, int j) -> int64_t {
    const int64_t to = first_column + x * kStep + j;
    return to < n ? to : -1;
  });
}

// A block has 32 columns: its threads side by side load a column each, and then each warp adds up
// one.
template <class A, class Out>
__global__ void __launch_bounds__(32 * kAddRows)
    add_pieces_kernel(const A* partial, int64_t pieces, int64_t n, Out* out, bool accumulate) {
  __shared__ A shared[32][kAddRows + 1];
  const int64_t first = int64_t{blockIdx.x} * 32;
  A sum = 0;
  if (first + threadIdx.x < n) {
#pragma unroll 4
    for (int64_t piece = threadIdx.y; piece < pieces; piece += kAddRows) {
      sum += partial[piece * n + first + threadIdx.x];
    }
  }
  shared[threadIdx.x][threadIdx.y] = sum;
  __syncthreads();
  static_assert(kAddRows == 32);
  sum = warp_sum(shared[threadIdx.y][threadIdx.x]);
  const int64_t column = first + threadIdx.y;
  if (threadIdx.x != 0 || column >= n) return;
  if (accumulate) sum += static_cast<A>(widen(out[column]));
  out[column] = round_to<Out>(sum);
}

// Threads of a block side by side, a power of two, and its rows at a time.
inline dim3 sum_block(int64_t steps) {
  unsigned width = 1;
  while (width < 32 && width < steps) width *= 2;
  return {width, kSumThreads / width};
}

// Adds the pieces of n sums, which lie one after the other, and stores or adds the result.
template <class A, class Out>
void add_pieces(const CudaKernelArguments& args, const A* partial, int64_t pieces, int64_t n,
                Out* out, bool accumulate) {
  launch(args, {static_cast<unsigned>(ceil_divide(n, 32)), dim3(32, kAddRows)},
         add_pieces_kernel<A, Out>, partial, pieces, n, out, accumulate);
}

template <class A, int kStep, class Out, class Term>
void sum_row_steps(const CudaKernelArguments& args, const LiveRows& rows, int64_t n,
                   const Term& term, Out* out, bool accumulate) {
  auto* partial = reinterpret_cast<A*>(args.scratch);
  const int64_t pieces = row_sum_pieces(rows.bound, n);
  const dim3 block = sum_block(n / kStep);
  launch(
      args,
      {dim3(static_cast<unsigned>(ceil_divide(n / kStep, block.x)), static_cast<unsigned>(pieces)),
       block},
      sum_pieces_kernel<A, kStep, Term>, term, rows, ceil_divide(rows.bound, pieces), n, partial);
  add_pieces(args, partial, pieces, n, out, accumulate);
}

// out[i] (+)= sum over the live rows of what the term Term<T, kStep>{parts...} has for column
// i < n. With packs: n and the term's rows are made of packs of T.
template <class T, template <class, int> class Term, class Out, class... Parts>
void sum_rows(const CudaKernelArguments& args, const LiveRows& rows, int64_t n, bool packs,
              Out* out, bool accumulate, const Parts&... parts) {
  using A = accumulation_t<T>;
  constexpr int kPack = Pack<T>::kElements;
  if (packs) {
    sum_row_steps<A, kPack>(args, rows, n, Term<T, kPack>{parts...}, out, accumulate);
  } else {
    sum_row_steps<A, 1>(args, rows, n, Term<T, 1>{parts...}, out, accumulate);
  }
}

// The rows themselves, as a bias is summed: data is [rows, n].
template <class T, int kStep>
struct RowTerm {
  const T* data;
  int64_t n;
  using Loaded = RawStep<T, kStep>;
  __device__ Loaded load(int64_t row, int64_t i) const {
    return load_raw<T, kStep>(data + row * n + i);
  }
  __device__ void add(const Loaded& row, accumulation_t<T> (&sums)[kStep]) const {
    const Pack<T> values = unpack(row);
#pragma unroll
    for (int j = 0; j < kStep; ++j) sums[j] += widen(values.values[j]);
  }
};

}  // namespace troupe
