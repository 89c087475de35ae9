// What the kernels of latent_tiles.h share: rows in shared memory, and products of their tiles by
// mma.m16n8k16.
//
// Rows are made of packs of 16 bytes; pack c of row r lies at place c ^ (r mod 8) of its eight, so
// that eight rows of one column are read without conflicts.
#pragma once

#include "ops/attention/sparse_attention/cuda/latent_tiles.h"
#include "ops/attention/sparse_attention/sparse_attention.h"
#include "ops/cuda/sm90.cuh"
#include "program/cuda/device.cuh"

namespace troupe {

inline constexpr int kLatentHeads = 64;  // of a block
inline constexpr int kLatentKeys = 64;   // at a time
inline constexpr int kLatentThreads = 256;

// Rows of kWidth elements in shared memory, at a multiple of 128 bytes.
template <int kWidth>
struct LatentRows {
  static constexpr int kBytes = kWidth * 2;  // of a row
  uint32_t base;

  __device__ __forceinline__ uint32_t at(int row, int column) const {
    return base +
           static_cast<uint32_t>(row * kBytes + ((column / 8) ^ (row & 7)) * 16 + column % 8 * 2);
  }
  // Fills rows [0, 64): source(row) is the row to copy; null: zeros. Not complete before
  // wait_copies().
  template <class Source>
  __device__ __forceinline__ void fill(const Source& source) const {
    constexpr int kPacks = kWidth / 8;
    for (int i = static_cast<int>(threadIdx.x); i < 64 * kPacks; i += kLatentThreads) {
      const int row = i / kPacks;
      const int column = i % kPacks * 8;
      const Bf16* from = source(row);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at(row, column)),
                   "l"(from == nullptr ? from : from + column), "r"(from == nullptr ? 0 : 16));
    }
  }
};

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;");
}
// Waits for all groups of this thread.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Rows row, row + 8 and columns 2 (lane % 4), + 1 of a tile of 16 x 8; row = lane / 4.
struct LatentTile {
  float values[4] = {};
};

__device__ __forceinline__ void multiply_latent(LatentTile& sum, const uint32_t (&left)[4],
                                                uint32_t right_0, uint32_t right_1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum.values[0]), "+f"(sum.values[1]), "+f"(sum.values[2]), "+f"(sum.values[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_0), "r"(right_1));
}

template <bool kTransposed>
__device__ __forceinline__ void load_latent(uint32_t address, uint32_t (&to)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
}

// The left operand: 16 rows from `row` on, 16 columns from `k` on of a matrix, or of the transposed
// of one.
template <bool kTransposed, int kWidth>
__device__ __forceinline__ void load_latent_left(const LatentRows<kWidth>& matrix, int row, int k,
                                                 uint32_t (&to)[4]) {
  const int number = static_cast<int>(threadIdx.x) % 32 / 8;
  const int i = static_cast<int>(threadIdx.x) % 8;
  if constexpr (kTransposed) {
    load_latent<true>(matrix.at(k + number / 2 * 8 + i, row + number % 2 * 8), to);
  } else {
    load_latent<false>(matrix.at(row + number % 2 * 8 + i, k + number / 2 * 8), to);
  }
}

// Two right operands, to[0..1] and to[2..3]: 16 rows from `k` on, 8 columns from `column` on and 8
// from there on. The matrix has a row for each k, or (kByColumn) for each column.
template <bool kByColumn, int kWidth>
__device__ __forceinline__ void load_latent_right(const LatentRows<kWidth>& matrix, int k,
                                                  int column, uint32_t (&to)[4]) {
  const int number = static_cast<int>(threadIdx.x) % 32 / 8;
  const int i = static_cast<int>(threadIdx.x) % 8;
  if constexpr (kByColumn) {
    load_latent<false>(matrix.at(column + number / 2 * 8 + i, k + number % 2 * 8), to);
  } else {
    load_latent<true>(matrix.at(k + number % 2 * 8 + i, column + number / 2 * 8), to);
  }
}

// sums += left [16 rows from `row` on, kDepth] right, of kTiles * 8 columns from `column` on.
template <bool kLeftTransposed, bool kByColumn, int kDepth, int kTiles, int kLeft, int kRight>
__device__ __forceinline__ void multiply_latent_rows(const LatentRows<kLeft>& left, int row,
                                                     const LatentRows<kRight>& right, int column,
                                                     LatentTile (&sums)[kTiles]) {
  static_assert(kTiles % 2 == 0);
#pragma unroll 4
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t of_left[4];
    load_latent_left<kLeftTransposed>(left, row, k, of_left);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t of_right[4];
      load_latent_right<kByColumn>(right, k, column + tile * 8, of_right);
      multiply_latent(sums[tile], of_left, of_right[0], of_right[1]);
      multiply_latent(sums[tile + 1], of_left, of_right[2], of_right[3]);
    }
  }
}

__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_pair(uint32_t address, float first, float second) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pack_pair(first, second)) : "memory");
}

// What a call's kernels read of queries and keys.
struct LatentCall {
  const Bf16* q;
  const Bf16* k;
  const int32_t* chosen;
  int64_t most;
  KeyRows rows;
  int heads;
  float scale;

  LatentCall(const CudaKernelArguments& args, const SparseAttentionAttributes& a, int first)
      : q(args.in<Bf16>(first)),
        k(args.in<Bf16>(first + 1)),
        chosen(args.in<int32_t>(first + 2)),
        most(args.input(first + 2).shape[1]),
        rows(a.rows()),
        heads(a.heads),
        scale(static_cast<float>(a.scale)) {}

  int head_blocks() const { return (heads + kLatentHeads - 1) / kLatentHeads; }

  // The rows of 64 heads of a query in a tensor of kWidth elements for each.
  template <int kWidth>
  __device__ __forceinline__ void fill_heads(const LatentRows<kWidth>& to, const Bf16* tensor,
                                             int64_t query, int first_head) const {
    to.fill([&](int row) -> const Bf16* {
      if (first_head + row >= heads) return nullptr;
      return tensor + (query * heads + first_head + row) * kWidth;
    });
  }
  __device__ __forceinline__ void fill_keys(const LatentRows<kLatentKeyDim>& to, int64_t query,
                                            const KeyPositions& positions, int64_t begin) const {
    const int64_t sequence = query / rows.rows;
    to.fill([&](int row) -> const Bf16* {
      if (begin + row >= positions.count) return nullptr;
      return k + rows.key(sequence, positions[begin + row]) * kLatentKeyDim;
    });
  }
};

}  // namespace troupe
