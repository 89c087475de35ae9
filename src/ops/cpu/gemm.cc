#include "ops/cpu/gemm.h"

#include <cblas.h>

// OpenBLAS has this function, other implementations of CBLAS do not: a weak reference, null there.
extern "C" void openblas_set_num_threads(int) __attribute__((weak));

namespace troupe {
namespace {

constexpr int64_t kWantedPieces = 8;
constexpr int64_t kMaximumTile = 512;
constexpr int64_t kMinimumTile = 64;

// A tile is not cut into pieces of fewer multiply-adds than this (some 0.1 ms): smaller tiles pack
// more operands for each product. A reduction may be cut further, because that packs nothing twice.
constexpr int64_t kMinimumTileWork = int64_t{1} << 22;
constexpr int64_t kMinimumReductionWork = int64_t{1} << 20;
// Adding up the pieces costs about a tenth of multiplying them at this length, less beyond.
constexpr int64_t kMinimumReduction = 512;

int64_t ceiling(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// Equal pieces, in whole vectors of 16 elements so that BLAS meets its ragged edge only once.
int64_t piece_size(int64_t count, int64_t pieces) {
  return std::min(count, ceiling(ceiling(count, pieces), 16) * 16);
}

void use_one_blas_thread() {
  static const bool done = [] {
    if (openblas_set_num_threads != nullptr) openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(done);
}

template <class T>
void multiply_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a,
                   int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == T(0) ? T(0) : beta * c[i * ldc + j];
    }
    return;
  }
  use_one_blas_thread();
  const CBLAS_TRANSPOSE op_a = trans_a ? CblasTrans : CblasNoTrans;
  const CBLAS_TRANSPOSE op_b = trans_b ? CblasTrans : CblasNoTrans;
  const auto size = [](int64_t value) { return static_cast<int>(value); };
  if constexpr (std::is_same_v<T, float>) {
    cblas_sgemm(CblasRowMajor, op_a, op_b, size(m), size(n), size(k), alpha, a, size(lda), b,
                size(ldb), beta, c, size(ldc));
  } else {
    cblas_dgemm(CblasRowMajor, op_a, op_b, size(m), size(n), size(k), alpha, a, size(lda), b,
                size(ldb), beta, c, size(ldc));
  }
}

}  // namespace

template <>
void gemm_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha,
               const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
               int64_t ldc) {
  multiply_tile(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

template <>
void gemm_tile(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha,
               const double* a, int64_t lda, const double* b, int64_t ldb, double beta, double* c,
               int64_t ldc) {
  multiply_tile(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

GemmTiles gemm_tiles(int64_t m, int64_t n, int64_t k, int64_t batch, bool split_reduction) {
  int64_t pieces_m = ceiling(m, kMaximumTile);
  int64_t pieces_n = ceiling(n, kMaximumTile);
  int64_t pieces_k = 1;
  while (batch * pieces_m * pieces_n * pieces_k < kWantedPieces) {
    const int64_t tile_m = ceiling(m, pieces_m);
    const int64_t tile_n = ceiling(n, pieces_n);
    const int64_t tile_k = ceiling(k, pieces_k);
    const int64_t work = tile_m * tile_n * tile_k;
    if (split_reduction && tile_k >= 2 * kMinimumReduction && work >= 2 * kMinimumReductionWork) {
      pieces_k *= 2;
    } else if (work <= 2 * kMinimumTileWork) {
      break;
    } else if (tile_m >= tile_n && tile_m >= 2 * kMinimumTile) {
      pieces_m *= 2;
    } else if (tile_n >= 2 * kMinimumTile) {
      pieces_n *= 2;
    } else {
      break;
    }
  }
  GemmTiles tiles;
  tiles.tile_m = piece_size(m, pieces_m);
  tiles.tile_n = piece_size(n, pieces_n);
  tiles.tile_k = piece_size(k, pieces_k);
  tiles.grid_m = ceiling(m, tiles.tile_m);
  tiles.grid_n = ceiling(n, tiles.tile_n);
  tiles.reductions = ceiling(k, tiles.tile_k);
  return tiles;
}

DType gemm_sum_dtype(DType a, DType b, DType c) {
  return a == DType::f64 || b == DType::f64 || c == DType::f64 ? DType::f64 : DType::f32;
}

uint64_t gemm_scratch_bytes(const GemmTiles& tiles, DType a, DType b, DType c) {
  const DType sum = gemm_sum_dtype(a, b, c);
  if (a == sum && b == sum && c == sum) return 0;
  const int64_t panel = std::min(tiles.tile_k, gemm_internal::kPanel);
  const int64_t elements = (tiles.tile_m + tiles.tile_n) * panel + tiles.tile_m * tiles.tile_n;
  return static_cast<uint64_t>(elements) * size_of(sum);
}

uint64_t gemm_workspace_bytes(const GemmTiles& tiles, int64_t m, int64_t n, DType sum) {
  if (tiles.reductions == 1) return 0;
  return static_cast<uint64_t>(tiles.reductions * m * n) * size_of(sum);
}

}  // namespace troupe
