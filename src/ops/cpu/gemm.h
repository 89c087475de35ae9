// Matrix products for CPU kernels: BLAS calls on tiles.
//
// A product is cut into tiles whose sizes depend on the problem alone; each tile is one
// single-threaded BLAS call (or a fixed sequence of them), and the callers spread the tiles over
// their ThreadPool. So the bits of a result do not depend on the number of threads. BLAS itself is
// told once to use one thread. Products are summed in double when either factor or the result is
// double, otherwise in float; factors of another type are converted panel by panel, and a result of
// another type is rounded once when a tile is stored.
//
// Everything here may be called from any number of threads at once. Nothing is owned and nothing
// allocated (BLAS keeps its own packing buffers); temporary memory is the caller's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/dtype.h"
#include "base/error.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {

// c[m,n] = alpha * op(a)[m,k] * op(b)[k,n] + beta * c, row-major, op(x) = x or its transpose. One
// single-threaded BLAS call for T = float or double. With beta = 0, c is not read; with k = 0 the
// product is zero.
template <class T>
void gemm_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
               int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc);
template <>
void gemm_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
               const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
               int64_t ldc);
template <>
void gemm_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
               const double* a, int64_t lda, const double* b, int64_t ldb, double beta, double* c,
               int64_t ldc);

// A factor of a product. Element (i, j) of the factor is data[i * stride + j], or
// data[j * stride + i] when the factor is the transpose of what is stored.
template <class T>
struct GemmOperand {
  const T* data = nullptr;
  int64_t stride = 0;
  bool transposed = false;

  GemmOperand block(int64_t i, int64_t j) const {
    return {data + (transposed ? j * stride + i : i * stride + j), stride, transposed};
  }
};

// How a product [m,n] with reduction k is cut: into tiles of tile_m x tile_n (those at the edges
// are smaller) and, where that is allowed and makes fewer than eight pieces of work, the reduction
// into `reductions` pieces of tile_k whose sums are added in order.
struct GemmTiles {
  int64_t tile_m = 0;
  int64_t tile_n = 0;
  int64_t tile_k = 0;
  int64_t grid_m = 0;
  int64_t grid_n = 0;
  int64_t reductions = 1;

  int64_t tiles() const { return grid_m * grid_n; }
};

// The tiles for `batch` products of one size that run in the same loop. Tiles have up to 512 x 512
// elements, and fewer when otherwise there were less than eight pieces of work worth sharing.
// `split_reduction` allows several reductions (see parallel_gemm): long reductions into small
// outputs, as weight gradients are, run a quarter faster in pieces than on small tiles.
GemmTiles gemm_tiles(int64_t m, int64_t n, int64_t k, int64_t batch = 1,
                     bool split_reduction = false);

// The type of the sums, given those of both factors and of the result.
template <class A, class B, class C>
using gemm_sum_t = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double> ||
                                          std::is_same_v<C, double>,
                                      double, float>;
DType gemm_sum_dtype(DType a, DType b, DType c);

// Scratch that gemm_block needs for one tile, given the dtypes of both factors and of the result.
uint64_t gemm_scratch_bytes(const GemmTiles& tiles, DType a, DType b, DType c);

// Workspace of parallel_gemm, given the dtype of the sums: partial sums of a split reduction; 0
// without a split.
uint64_t gemm_workspace_bytes(const GemmTiles& tiles, int64_t m, int64_t n, DType sum);

namespace gemm_internal {

// Reduction length of the panels that are converted at a time. Long enough that a BLAS
// call amortises its start, short enough that two panels of 512 rows stay in the second-level
// cache.
inline constexpr int64_t kPanel = 512;

template <class T, class Sum>
void convert(const T* in, Sum* out, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Sum>(widen(in[i]));
}

// The factor itself when it has the type of the sums, otherwise a contiguous converted copy.
template <class Sum, class T>
GemmOperand<Sum> in_sum_type(const GemmOperand<T>& operand, int64_t rows, int64_t columns,
                             Sum* buffer) {
  if constexpr (std::is_same_v<T, Sum>) {
    return operand;
  } else {
    if (operand.transposed) std::swap(rows, columns);
    for (int64_t i = 0; i < rows; ++i) {
      convert(operand.data + i * operand.stride, buffer + i * columns, columns);
    }
    return {buffer, columns, operand.transposed};
  }
}

}  // namespace gemm_internal

// One tile, on the calling thread: c[m,n] = a[m,k] * b[k,n] (+ bias[n] on each row) (+ c when
// `accumulate`, which excludes a bias). A C of another type than the sums is rounded once.
// `scratch`: gemm_scratch_bytes(), unused when all types are the same.
template <class A, class B, class C>
void gemm_block(const GemmOperand<A>& a, const GemmOperand<B>& b, int64_t m, int64_t n, int64_t k,
                C* c, int64_t ldc, bool accumulate, const B* bias, gemm_sum_t<A, B, C>* scratch) {
  using Sum = gemm_sum_t<A, B, C>;
  constexpr bool kConvertFactors = !std::is_same_v<A, Sum> || !std::is_same_v<B, Sum>;
  Sum* sums = nullptr;
  int64_t sums_stride = 0;
  if constexpr (std::is_same_v<C, Sum>) {
    sums = c;
    sums_stride = ldc;
  } else {
    sums = scratch;
    sums_stride = n;
    scratch += m * n;
    for (int64_t i = 0; accumulate && i < m; ++i) {
      gemm_internal::convert(c + i * ldc, sums + i * n, n);
    }
  }
  if (bias != nullptr) {
    for (int64_t i = 0; i < m; ++i) gemm_internal::convert(bias, sums + i * sums_stride, n);
  }
  Sum beta = accumulate || bias != nullptr ? Sum(1) : Sum(0);
  const int64_t step = kConvertFactors ? std::min(k, gemm_internal::kPanel) : k;
  int64_t begin = 0;
  do {
    const int64_t count = std::min(step, k - begin);
    const auto left = gemm_internal::in_sum_type<Sum>(a.block(0, begin), m, count, scratch);
    const auto right =
        gemm_internal::in_sum_type<Sum>(b.block(begin, 0), count, n, scratch + m * step);
    gemm_tile<Sum>(left.transposed, right.transposed, m, n, count, Sum(1), left.data, left.stride,
                   right.data, right.stride, beta, sums, sums_stride);
    beta = Sum(1);
    begin += count;
  } while (begin < k);
  if constexpr (!std::is_same_v<C, Sum>) {
    for (int64_t i = 0; i < m; ++i) {
      TROUPE_INDEPENDENT
      for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = C(sums[i * n + j]);
    }
  }
}

// c[m,n] = a[m,k] * b[k,n] (+ bias) (+ c), see gemm_block, with its tiles spread over args.pool.
// Uses the kernel's scratch (gemm_scratch_bytes) and, when tiles.reductions > 1, its workspace
// (gemm_workspace_bytes); then there is no bias.
template <class A, class B, class C>
void parallel_gemm(const KernelArguments& args, const GemmTiles& tiles, const GemmOperand<A>& a,
                   const GemmOperand<B>& b, int64_t m, int64_t n, int64_t k, C* c, int64_t ldc,
                   bool accumulate, const B* bias) {
  using Sum = gemm_sum_t<A, B, C>;
  const bool split = tiles.reductions > 1;
  TROUPE_CHECK(!split || bias == nullptr, "this product cannot split its reduction");
  Sum* partial_sums = reinterpret_cast<Sum*>(args.workspace);
  args.pool->parallel_for(tiles.tiles() * tiles.reductions, [&](int64_t piece, int worker) {
    const int64_t reduction = piece / tiles.tiles();
    const int64_t tile = piece % tiles.tiles();
    const int64_t i = tile / tiles.grid_n * tiles.tile_m;
    const int64_t j = tile % tiles.grid_n * tiles.tile_n;
    const int64_t begin = reduction * tiles.tile_k;
    const int64_t count = std::min(tiles.tile_k, k - begin);
    const auto multiply = [&](auto* target, int64_t stride, bool add, const B* bias_part) {
      gemm_block(a.block(i, begin), b.block(begin, j), std::min(tiles.tile_m, m - i),
                 std::min(tiles.tile_n, n - j), count, target, stride, add, bias_part,
                 args.thread_scratch<Sum>(worker));
    };
    if (split) {
      multiply(partial_sums + (reduction * m + i) * n + j, n, false, nullptr);
    } else {
      multiply(c + i * ldc + j, ldc, accumulate, bias == nullptr ? nullptr : bias + j);
    }
  });
  if (!split) return;
  args.pool->parallel_ranges(
      m, std::max<int64_t>(1, 4096 / n), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
          C* row = c + i * ldc;
          for (int64_t j = 0; j < n; ++j) {
            Sum sum = partial_sums[i * n + j];
            for (int64_t r = 1; r < tiles.reductions; ++r) sum += partial_sums[(r * m + i) * n + j];
            row[j] = C(accumulate ? static_cast<Sum>(widen(row[j])) + sum : sum);
          }
        }
      });
}

}  // namespace troupe
