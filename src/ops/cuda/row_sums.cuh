// Sums over the rows of a tensor, as gradients of gains and biases are: the counterpart of
// ops/cpu/row_sums.h. The rows are cut into pieces that are summed apart and then added in order,
// so the bits depend on the sizes alone.
//
// What is summed is a term: a template over the element type and kStep, which is a pack's elements
// (device.cuh) or 1. It is callable on the GPU as term(row, column, sums), and adds to the kStep
// numbers `sums` what the row has for columns column, column + 1, ...
#pragma once

#include "ops/cuda/device.cuh"

namespace troupe {

inline constexpr int kSumThreads = 256;
inline constexpr int kAddRows = 8;  // pieces that a block adds at a time

// Pieces for n sums over `rows` rows: enough for all of the GPU where n is small, and not so many
// that adding them would take long.
inline int64_t row_sum_pieces(int64_t rows, int64_t n) {
  const int64_t wanted = ceil_divide(kMostBlocks / 4, ceil_divide(n, 256));
  return std::clamp<int64_t>(std::min(wanted, ceil_divide(rows, 16)), 1, 512);
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

// A block has blockDim.x * kStep columns of a piece, and blockDim.y of its rows at a time.
template <class A, int kStep, class Term>
__global__ void __launch_bounds__(kSumThreads)
    sum_pieces_kernel(Term term, LiveRows rows, int64_t piece_rows, int64_t n, A* partial) {
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
#pragma unroll 4
    for (int64_t row = begin + y; row < end; row += height) term(row, column, sums);
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

template <class A, class Out>
__global__ void add_pieces_kernel(const A* partial, int64_t pieces, int64_t n, Out* out,
                                  bool accumulate) {
  __shared__ A shared[kAddRows][32];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  A sum = 0;
  if (column < n) {
#pragma unroll 8
    for (int64_t piece = threadIdx.y; piece < pieces; piece += kAddRows) {
      sum += partial[piece * n + column];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int i = 1; i < kAddRows; ++i) sum += shared[i][threadIdx.x];
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
  launch(args, {static_cast<unsigned>(ceil_divide(n, 32)), dim3(32, kAddRows)},
         add_pieces_kernel<A, Out>, partial, pieces, n, out, accumulate);
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
  __device__ void operator()(int64_t row, int64_t i, accumulation_t<T> (&sums)[kStep]) const {
    const Pack<T> values = load_step<T, kStep>(data + row * n + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) sums[j] += widen(values.values[j]);
  }
};

}  // namespace troupe
