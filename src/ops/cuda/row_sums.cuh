// Sums over the rows of a tensor, as gradients of gains and biases are: the counterpart of
// ops/cpu/row_sums.h. The rows are cut into pieces that are summed apart and then added in order,
// so the bits depend on the sizes alone.
#pragma once

#include "ops/cuda/device.cuh"

namespace troupe {

inline constexpr int kSumColumns = 32;  // of a block
inline constexpr int kSumRows = 8;      // that a block reads at a time

inline int64_t row_sum_pieces(int64_t rows) {
  return std::clamp<int64_t>(ceil_divide(rows, 64), 1, 64);
}

// Scratch memory of sum_rows() over `rows` rows, with n sums of type A.
template <class A>
uint64_t row_sums_bytes(int64_t rows, int64_t n) {
  return static_cast<uint64_t>(row_sum_pieces(rows) * n) * sizeof(A);
}
inline uint64_t row_sums_bytes(DType accumulation, int64_t rows, int64_t n) {
  return accumulation == DType::f64 ? row_sums_bytes<double>(rows, n)
                                    : row_sums_bytes<float>(rows, n);
}

template <class A, class Term>
__global__ void sum_pieces_kernel(Term term, LiveRows rows, int64_t piece_rows, int64_t n,
                                  A* partial) {
  __shared__ A shared[kSumRows][kSumColumns];
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const int64_t begin = int64_t{blockIdx.y} * piece_rows;
  const int64_t live = rows.count();
  const int64_t end = begin + piece_rows < live ? begin + piece_rows : live;
  A sum = 0;
  if (column < n) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kSumRows) sum += term(row, column);
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int i = 1; i < kSumRows; ++i) sum += shared[i][threadIdx.x];
  partial[int64_t{blockIdx.y} * n + column] = sum;
}

template <class A, class Out>
__global__ void add_pieces_kernel(const A* partial, int64_t pieces, int64_t n, Out* out,
                                  bool accumulate) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= n) return;
  A sum = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) sum += partial[piece * n + column];
  if (accumulate) sum += static_cast<A>(out[column]);
  out[column] = static_cast<Out>(sum);
}

// out[i] (+)= sum over the live rows of term(row, i), for i < n. `term` is callable on the GPU.
template <class A, class Out, class Term>
void sum_rows(const CudaKernelArguments& args, const LiveRows& rows, int64_t n, const Term& term,
              Out* out, bool accumulate) {
  auto* partial = reinterpret_cast<A*>(args.scratch);
  const int64_t pieces = row_sum_pieces(rows.bound);
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(n, kSumColumns)), static_cast<unsigned>(pieces)),
          dim3(kSumColumns, kSumRows)},
         sum_pieces_kernel<A, Term>, term, rows, ceil_divide(rows.bound, pieces), n, partial);
  launch(args, {static_cast<unsigned>(ceil_divide(n, 256)), 256}, add_pieces_kernel<A, Out>,
         partial, pieces, n, out, accumulate);
}

}  // namespace troupe
