// What the kernels of a chunk of rows share: products of tiles in shared memory on tensor cores,
// and the decays between the chunk's rows. Private to the operation.
#pragma once

#include "ops/attention/gated_delta_rule/cuda/delta_sm90.cuh"

namespace troupe {

// Elements of a row of a tile in shared memory: eight rows begin in different banks.
inline constexpr int kDeltaPitch = kDeltaHead + 8;
inline constexpr int kDeltaSquarePitch = kDeltaChunk + 8;

// Four floats of a 16 x 8 tile: rows lane / 4 and that + 8, columns 2 (lane % 4) and the next one.
struct Tile {
  float values[4] = {};
};
// Operands of mma.m16n8k16.
struct Left {
  uint32_t values[4];
};
struct Right {
  uint32_t values[2];
};

__device__ __forceinline__ void multiply_add(Tile& c, const Left& a, const Right& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.values[0]), "+f"(c.values[1]), "+f"(c.values[2]), "+f"(c.values[3])
      : "r"(a.values[0]), "r"(a.values[1]), "r"(a.values[2]), "r"(a.values[3]), "r"(b.values[0]),
        "r"(b.values[1]));
}

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(const Bf16* address, uint32_t (&to)[4]) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
  }
}

__device__ __forceinline__ int lane_of() {
  return static_cast<int>(threadIdx.x) % 32;
}

// Rows `row` and columns `k` on, 16 of each, of a matrix, or of the transposed of a matrix.
template <bool kTransposed, int kWidth>
__device__ __forceinline__ Left load_left(const Bf16 (*matrix)[kWidth], int row, int k) {
  const int number = lane_of() / 8;
  const int i = lane_of() % 8;
  Left left;
  if constexpr (kTransposed) {
    load_matrices<true>(&matrix[k + number / 2 * 8 + i][row + number % 2 * 8], left.values);
  } else {
    load_matrices<false>(&matrix[row + number % 2 * 8 + i][k + number / 2 * 8], left.values);
  }
  return left;
}

// Two right operands of rows `k` on, 16 of them, and columns `column` on and + 8. The matrix has a
// row for each k, or (kByColumn) for each column.
template <bool kByColumn, int kWidth>
__device__ __forceinline__ void load_right(const Bf16 (*matrix)[kWidth], int k, int column,
                                           Right& first, Right& second) {
  const int number = lane_of() / 8;
  const int i = lane_of() % 8;
  uint32_t values[4];
  if constexpr (kByColumn) {
    load_matrices<false>(&matrix[column + number / 2 * 8 + i][k + number % 2 * 8], values);
  } else {
    load_matrices<true>(&matrix[k + number % 2 * 8 + i][column + number / 2 * 8], values);
  }
  first = {{values[0], values[1]}};
  second = {{values[2], values[3]}};
}

__device__ __forceinline__ Left negated(Left left) {
  for (uint32_t& pair : left.values) pair ^= 0x80008000U;
  return left;
}

enum class Sign { plus, minus };

// tiles += or -= the left matrix's rows `row` on times the right one's columns `column` on; over
// kDepth.
template <int kDepth, bool kTransposed, bool kByColumn, Sign kSign = Sign::plus, int kCount,
          int kLeftWidth, int kRightWidth>
__device__ __forceinline__ void multiply(Tile (&tiles)[kCount], const Bf16 (*left)[kLeftWidth],
                                         const Bf16 (*right)[kRightWidth], int row, int column) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    Left a = load_left<kTransposed>(left, row, k);
    if constexpr (kSign == Sign::minus) a = negated(a);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      Right first;
      Right second;
      load_right<kByColumn>(right, k, column + 8 * i, first, second);
      multiply_add(tiles[i], a, first);
      multiply_add(tiles[i + 1], a, second);
    }
  }
}

// Of a chunk's rows. With G_t the sum of g over them up to t: what decays a state from before the
// chunk to the row, e^{G_t}, and from the row to the end, each 0 where another document begins in
// between. Rows beyond the sequence write nothing and decay nothing.
struct ChunkGates {
  float beta[kDeltaChunk];
  float growth[kDeltaChunk];  // G
  int document[kDeltaChunk];  // documents that begin in the chunk up to the row
  float from_start[kDeltaChunk];
  float to_end[kDeltaChunk];

  // From row i to row t >= i.
  __device__ float decay(int t, int i) const {
    return document[t] == document[i] ? expf(growth[t] - growth[i]) : 0.0F;
  }
};

// Of the `count` rows from `first` on, chunk `chunk` of their sequence. By one warp, two rows a
// lane.
__device__ __forceinline__ void load_chunk_gates(const DeltaOperands& in, int64_t first, int chunk,
                                                 int count, int head, ChunkGates& gates) {
  float growth[2];
  float beta[2];
  int start[2];
  const int lane = lane_of();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = first + min(2 * lane + i, count - 1);
    const float* gate = in.gates + row * 2 * in.a.value_heads;
    beta[i] = gate[head];
    growth[i] = gate[in.a.value_heads + head];
    start[i] = in.starts != nullptr ? in.starts[row] : in.from_zeros() ? 0 : -1;
  }
  int begins[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    begins[i] = t < count && chunk * kDeltaChunk + t == start[i] ? 1 : 0;
    gates.beta[t] = t < count ? beta[i] : 0.0F;
    if (t >= count || begins[i] != 0) growth[i] = 0;
  }
  float sum = growth[0] + growth[1];
  int documents = begins[0] + begins[1];
  for (int width = 1; width < 32; width *= 2) {
    const float more = __shfl_up_sync(0xffffffffU, sum, width);
    const int others = __shfl_up_sync(0xffffffffU, documents, width);
    if (lane >= width) {
      sum += more;
      documents += others;
    }
  }
  const float last = __shfl_sync(0xffffffffU, sum, 31);
  const int last_document = __shfl_sync(0xffffffffU, documents, 31);
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    const float g = i == 1 ? sum : sum - growth[1];
    const int document = i == 1 ? documents : documents - begins[1];
    gates.growth[t] = g;
    gates.document[t] = document;
    gates.from_start[t] = document == 0 ? expf(g) : 0.0F;
    gates.to_end[t] = document == last_document ? expf(last - g) : 0.0F;
  }
}

}  // namespace troupe
