// Sums over the rows of a tensor, as gradients of gains and biases are: the counterpart of
// ops/cpu/row_sums.h. The rows are cut into pieces that are summed apart and then added in order,
// so the bits depend on the sizes alone.
//
// What is summed is a term: a template over the element type and kStep, which is a pack's elements
// (device.cuh) or 1. On the GPU, term.load(row, column) returns what the row has for columns column
// ... column + kStep - 1, as it lies in memory, a term::Loaded, and term.add(loaded, sums) adds it
// to kStep numbers. Loads are apart so that several are on their way at once.
#pragma once

#include "ops/cuda/raw_step.cuh"

namespace troupe {

inline constexpr int kSumThreads = 256;
inline constexpr int kSumLoads = 4;  // rows of a thread that are on their way at once
inline constexpr int kAddRows = 32;  // pieces that a block adds at a time

// Pieces for n sums over `rows` rows: as many as the GPU works on at once, at the registers that
// the terms take, and not so many that adding them would take long.
inline int64_t row_sum_pieces(int64_t rows, int64_t n) {
  const int64_t wanted = ceil_divide(kMostBlocks / 4, ceil_divide(n, 256));
  return std::clamp<int64_t>(std::min(wanted, ceil_divide(rows, 16)), 1, kMostBlocks / 8);
}

// Scratch memory of sum_rows() over `rows` rows, with n sums of type A.
template <class A>
uint64_t row_sums_bytes(int64_t rows, int64_t n) {
  return static_cast<uint64_t>(row_sum_pieces(rows, n) * n) * sizeof(A);
}
inline uint64_t row_sums_bytes(DType accumulation, int64_t rows, int64_t n) {
  return accumulation == DType::f64 ? row_sums_bytes<double>(rows, n)
                                    : row_sums_bytes<float>(rows, n);
}

// The rows of a term, where every live row of a tensor is made of `parts` of them.
struct TermRows {
  LiveRows rows;
  int64_t parts = 1;

  int64_t bound() const { return rows.bound * parts; }
  __device__ int64_t count() const { return rows.count() * parts; }
};

// A block has blockDim.x * kStep columns of a piece, and blockDim.y of its rows at a time.
template <class A, int kStep, class Term>
__global__ void __launch_bounds__(kSumThreads, 4)
    sum_pieces_kernel(Term term, TermRows rows, int64_t piece_rows, int64_t n, A* partial) {
  __shared__ A shared[kSumThreads][kStep];
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const int width = static_cast<int>(blockDim.x);
  const int height = static_cast<int>(blockDim.y);
  const int64_t column = (int64_t{blockIdx.x} * width + x) * kStep;
  const int64_t begin = int64_t{blockIdx.y} * piece_rows;
  const int64_t live = rows.count();
  const int64_t end = begin + piece_rows < live ? begin + piece_rows : live;
  A sums[kStep] = {};
  if (column < n) {
    int64_t row = begin + y;
    for (; row + (kSumLoads - 1) * height < end; row += kSumLoads * height) {
      typename Term::Loaded loaded[kSumLoads];
#pragma unroll
      for (int i = 0; i < kSumLoads; ++i) loaded[i] = term.load(row + i * height, column);
#pragma unroll
      for (int i = 0; i < kSumLoads; ++i) term.add(loaded[i], sums);
    }
    for (; row < end; row += height) term.add(term.load(row, column), sums);
  }
#pragma unroll
  for (int j = 0; j < kStep; ++j) shared[y * width + x][j] = sums[j];
  __syncthreads();
  if (y != 0 || column >= n) return;
  for (int i = 1; i < height; ++i) {
#pragma unroll
    for (int j = 0; j < kStep; ++j) sums[j] += shared[i * width + x][j];
  }
#pragma unroll
  for (int j = 0; j < kStep; ++j) partial[int64_t{blockIdx.y} * n + column + j] = sums[j];
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

template <class A, int kStep, class Out, class Term>
void sum_row_steps(const CudaKernelArguments& args, const TermRows& rows, int64_t n,
                   const Term& term, Out* out, bool accumulate) {
  auto* partial = reinterpret_cast<A*>(args.scratch);
  const int64_t pieces = row_sum_pieces(rows.bound(), n);
  const dim3 block = sum_block(n / kStep);
  launch(
      args,
      {dim3(static_cast<unsigned>(ceil_divide(n / kStep, block.x)), static_cast<unsigned>(pieces)),
       block},
      sum_pieces_kernel<A, kStep, Term>, term, rows, ceil_divide(rows.bound(), pieces), n, partial);
  launch(args, {static_cast<unsigned>(ceil_divide(n, 32)), dim3(32, kAddRows)},
         add_pieces_kernel<A, Out>, partial, pieces, n, out, accumulate);
}

// out[i] (+)= sum over the live rows of what the term Term<T, kStep>{parts...} has for column
// i < n. With packs: n and the term's rows are made of packs of T.
template <class T, template <class, int> class Term, class Out, class... Parts>
void sum_rows(const CudaKernelArguments& args, const TermRows& rows, int64_t n, bool packs,
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
