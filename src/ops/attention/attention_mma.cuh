// Attention in bf16 on tensor cores, for heads of 64 and 128 elements: the same kernels as in
// attention_cuda.cu, with products of 16 x 8 x 16 (PTX mma.m16n8k16) of which the sums stay in
// registers (Dao, "FlashAttention-2", 2023). Probabilities, and the gradients of scores, are
// rounded to bf16 where they enter a product; everything else between the operands is in fp32.
//
// A block of four warps works on 64 rows of its result, 16 for each warp, and goes through tiles of
// 64 rows of the other side. While one tile is multiplied, the next one is copied. Private to
// attention_cuda.cu.
//
// What a lane holds of a 16 x 8 sum, with g = lane / 4 and t = lane % 4: the elements (g, 2 t),
// (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). Two neighbouring sums, rounded to bf16 and put in
// pairs, are the left operand of a product 16 deep.
#pragma once

#include "ops/attention/attention_sizes.cuh"

namespace troupe {
namespace {

constexpr int kMmaRows = 64;  // of a tile
constexpr int kMmaThreads = 128;
constexpr int kMmaSums = kMmaRows / 8;  // sums of a warp's rows with all rows of a tile
constexpr float kLog2E = 1.4426950408889634F;

// Sums of 16 rows with 8 kCount columns.
template <int kCount>
using MmaSums = float[kCount][4];

// A tile in shared memory: kMmaRows rows of D elements. Rows are 16 bytes longer, so that eight of
// them begin in different banks.
template <int D>
struct MmaTile {
  static constexpr int kStride = D + 8;
  static constexpr int kElements = kMmaRows * kStride;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// sum += a b
__device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const Bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&matrices)[4], const Bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copies rows [first, first + kMmaRows) of a sequence without waiting; rows beyond it become zero.
template <int D>
__device__ __forceinline__ void start_copy(const Bf16* source, int64_t stride, int64_t first,
                                           int64_t sequence, Bf16* tile) {
  constexpr int kPacks = D / 8;  // of a row
  for (int i = static_cast<int>(threadIdx.x); i < kMmaRows * kPacks; i += kMmaThreads) {
    const int row = i / kPacks;
    const int column = i % kPacks * 8;
    const bool exists = first + row < sequence;
    const Bf16* from = exists ? source + (first + row) * stride + column : source;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(tile + row * MmaTile<D>::kStride + column)), "l"(from),
                   "r"(exists ? 16 : 0)
                 : "memory");
  }
}
__device__ __forceinline__ void end_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all copies, or for all but those of the last group.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
}

// sums = rows [first_row, first_row + 16) of `left`, times all rows of `right`.
template <int D>
__device__ __forceinline__ void multiply_rows(const Bf16* left, int first_row, const Bf16* right,
                                              MmaSums<kMmaSums>& sums) {
  constexpr int kStride = MmaTile<D>::kStride;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (auto& sum : sums) {
#pragma unroll
    for (float& value : sum) value = 0.0F;
  }
  const Bf16* a_row = left + (first_row + lane % 16) * kStride + lane / 16 * 8;
  const Bf16* b_row = right + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int depth = 0; depth < D; depth += 16) {
    uint32_t a[4];
    load_matrices(a, a_row + depth);
#pragma unroll
    for (int column = 0; column < kMmaRows; column += 16) {
      uint32_t b[4];
      load_matrices(b, b_row + column * kStride + depth);
      mma(sums[column / 8], a, b[0], b[1]);
      mma(sums[column / 8 + 1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits = 0;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// sums += weights [16, kMmaRows] (rounded to bf16) times the tile [kMmaRows, D].
template <int D>
__device__ __forceinline__ void add_weighted(const MmaSums<kMmaSums>& weights, const Bf16* tile,
                                             MmaSums<D / 8>& sums) {
  constexpr int kStride = MmaTile<D>::kStride;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Bf16* b_row = tile + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int depth = 0; depth < kMmaRows; depth += 16) {
    const auto& first = weights[depth / 8];
    const auto& second = weights[depth / 8 + 1];
    const uint32_t a[4] = {pack_pair(first[0], first[1]), pack_pair(first[2], first[3]),
                           pack_pair(second[0], second[1]), pack_pair(second[2], second[3])};
#pragma unroll
    for (int column = 0; column < D; column += 16) {
      uint32_t b[4];
      load_transposed(b, b_row + depth * kStride + column);
      mma(sums[column / 8], a, b[0], b[1]);
      mma(sums[column / 8 + 1], a, b[2], b[3]);
    }
  }
}

// Over the four lanes that share a row.
template <class Combine>
__device__ __forceinline__ float over_lanes(float value, const Combine& combine) {
  value = combine(value, __shfl_xor_sync(0xffffffffU, value, 1));
  return combine(value, __shfl_xor_sync(0xffffffffU, value, 2));
}

// Rows g and g + 8 of a warp's result, times a factor each.
template <int D>
__device__ __forceinline__ void store_rows(const MmaSums<D / 8>& sums, const float (&factor)[2],
                                           Bf16* (&rows)[2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows[half] == nullptr) continue;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const uint32_t pair =
          pack_pair(sums[n][2 * half] * factor[half], sums[n][2 * half + 1] * factor[half]);
      *reinterpret_cast<uint32_t*>(rows[half] + n * 8 + 2 * t) = pair;
    }
  }
}

// Is every pair of the tiles' rows visible, so that nothing needs to be masked?
__device__ __forceinline__ bool sees_all(const AttentionSizes& sizes, int64_t first_query,
                                         int64_t first_key) {
  return first_key + kMmaRows - 1 <= first_query && first_query + kMmaRows <= sizes.sequence &&
         (sizes.window == 0 || first_key > first_query + kMmaRows - 1 - sizes.window);
}

template <int D>
__global__ void __launch_bounds__(kMmaThreads)
    attention_mma_kernel(const Bf16* qkv, Bf16* out, float* lse, AttentionSizes sizes) {
  constexpr int kElements = MmaTile<D>::kElements;
  extern __shared__ __align__(16) std::byte shared_memory[];
  auto* const q_tile = reinterpret_cast<Bf16*>(shared_memory);
  Bf16* const k_tiles = q_tile + kElements;  // two of each
  Bf16* const v_tiles = k_tiles + 2 * kElements;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  // The last tiles see the most keys: they start first.
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * kMmaRows;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t stride = sizes.qkv_stride();
  const Bf16* rows = qkv + b * sizes.sequence * stride;
  const Bf16* keys = rows + (sizes.heads + group) * D;
  const Bf16* values = rows + (sizes.heads + sizes.groups + group) * D;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;
  const float scale = static_cast<float>(sizes.scale) * kLog2E;

  const int64_t begin = sizes.first_key(first_query) / kMmaRows * kMmaRows;
  const int64_t end =
      first_query + kMmaRows < sizes.sequence ? first_query + kMmaRows : sizes.sequence;
  start_copy<D>(rows + head * D, stride, first_query, sizes.sequence, q_tile);
  start_copy<D>(keys, stride, begin, sizes.sequence, k_tiles);
  start_copy<D>(values, stride, begin, sizes.sequence, v_tiles);
  end_group();

  MmaSums<D / 8> sums = {};
  float largest[2] = {-infinity<float>(), -infinity<float>()};  // of scores times log2 e
  float total[2] = {0.0F, 0.0F};                                // of this lane's columns
  int stage = 0;
  for (int64_t first_key = begin; first_key < end; first_key += kMmaRows, stage ^= 1) {
    if (first_key + kMmaRows < end) {
      start_copy<D>(keys, stride, first_key + kMmaRows, sizes.sequence,
                    k_tiles + (stage ^ 1) * kElements);
      start_copy<D>(values, stride, first_key + kMmaRows, sizes.sequence,
                    v_tiles + (stage ^ 1) * kElements);
      end_group();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    MmaSums<kMmaSums> scores;
    multiply_rows<D>(q_tile, warp * 16, k_tiles + stage * kElements, scores);
    const bool masks = !sees_all(sizes, first_query, first_key);
    float next[2] = {largest[0], largest[1]};
#pragma unroll
    for (int n = 0; n < kMmaSums; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores[n][e];
        score *= scale;
        if (masks && !sizes.sees(first_query + warp * 16 + g + e / 2 * 8,
                                 first_key + n * 8 + 2 * t + e % 2)) {
          score = -infinity<float>();
        }
        next[e / 2] = score > next[e / 2] ? score : next[e / 2];
      }
    }
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      next[half] = over_lanes(next[half], [](float a, float c) { return a > c ? a : c; });
      // A row that has seen nothing yet has nothing to rescale.
      const bool nothing = next[half] == -infinity<float>();
      shift[half] = nothing ? 0.0F : next[half];
      const float factor = nothing ? 1.0F : exp2f(largest[half] - next[half]);
      largest[half] = next[half];
      total[half] *= factor;
#pragma unroll
      for (auto& sum : sums) {
        sum[2 * half] *= factor;
        sum[2 * half + 1] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < kMmaSums; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = exp2f(scores[n][e] - shift[e / 2]);
        total[e / 2] += p;
        const bool kept =
            !sizes.drops || sizes.keeps(seed, b, head, first_query + warp * 16 + g + e / 2 * 8,
                                        first_key + n * 8 + 2 * t + e % 2);
        scores[n][e] = kept ? p : 0.0F;
      }
    }
    add_weighted<D>(scores, v_tiles + stage * kElements, sums);
    __syncthreads();
  }

  const float kept_scale = sizes.drops ? static_cast<float>(sizes.dropout.scale) : 1.0F;
  float factor[2];
  Bf16* targets[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = over_lanes(total[half], [](float a, float c) { return a + c; });
    factor[half] = kept_scale / sum;
    const int64_t query = first_query + warp * 16 + g + half * 8;
    const int64_t token = b * sizes.sequence + query;
    const bool exists = query < sizes.sequence;
    targets[half] = exists ? out + token * sizes.out_stride() + head * D : nullptr;
    if (exists && t == 0) {
      lse[token * sizes.heads + head] = (largest[half] + log2f(sum)) / kLog2E;
    }
  }
  store_rows<D>(sums, factor, targets);
}

// Of one score: the probability as it multiplies the values, and the gradient of the score over
// `scale`. `log_sum` and `out_dot` are those of the query.
__device__ __forceinline__ ProbabilityGradient<float> differentiate_score(
    const AttentionSizes& sizes, bool masks, uint64_t seed, int64_t b, int head, int64_t query,
    int64_t key, float score, float dp, float log_sum, float out_dot) {
  if (masks && !sizes.sees(query, key)) return {0.0F, 0.0F};
  const float p = exp2f((score * static_cast<float>(sizes.scale) - log_sum) * kLog2E);
  float kept = p;
  if (sizes.drops) {
    const float factor =
        sizes.keeps(seed, b, head, query, key) ? static_cast<float>(sizes.dropout.scale) : 0.0F;
    kept *= factor;
    dp *= factor;
  }
  return {kept, p * (dp - out_dot)};
}

// dk and dv: rows are keys, columns queries. Goes through the group's heads and their tiles of
// queries in order.
template <int D>
__global__ void __launch_bounds__(kMmaThreads)
    key_gradients_mma_kernel(GradientOperands<Bf16> operands, Bf16* d_qkv, AttentionSizes sizes) {
  constexpr int kElements = MmaTile<D>::kElements;
  extern __shared__ __align__(16) std::byte shared_memory[];
  auto* const k_tile = reinterpret_cast<Bf16*>(shared_memory);
  Bf16* const v_tile = k_tile + kElements;
  Bf16* const q_tiles = v_tile + kElements;  // two of each
  Bf16* const go_tiles = q_tiles + 2 * kElements;
  auto* const log_sums = reinterpret_cast<float*>(go_tiles + 2 * kElements);
  float* const out_dots = log_sums + 2 * kMmaRows;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t first_key = int64_t{blockIdx.x} * kMmaRows;
  const auto group = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int heads_per_group = sizes.heads / sizes.groups;
  const int64_t stride = sizes.qkv_stride();
  const Bf16* rows = operands.qkv + b * sizes.sequence * stride;
  const int64_t key_column = int64_t{sizes.heads + group} * D;
  const int64_t value_column = int64_t{sizes.heads + sizes.groups + group} * D;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  // Queries from this one on see none of the keys.
  int64_t end_query = sizes.sequence;
  if (sizes.window > 0 && first_key + kMmaRows - 1 + sizes.window < end_query) {
    end_query = first_key + kMmaRows - 1 + sizes.window;
  }
  const int64_t query_tiles = (end_query - first_key + kMmaRows - 1) / kMmaRows;
  const int64_t pieces = heads_per_group * query_tiles;
  const auto head_of = [=](int64_t piece) {
    return group * heads_per_group + static_cast<int>(piece / query_tiles);
  };
  const auto query_of = [=](int64_t piece) { return first_key + piece % query_tiles * kMmaRows; };
  const auto start_piece = [&](int64_t piece, int to) {
    const int head = head_of(piece);
    const int64_t first_query = query_of(piece);
    start_copy<D>(rows + head * D, stride, first_query, sizes.sequence, q_tiles + to * kElements);
    start_copy<D>(operands.d_out + b * sizes.sequence * sizes.out_stride() + head * D,
                  sizes.out_stride(), first_query, sizes.sequence, go_tiles + to * kElements);
    for (int i = static_cast<int>(threadIdx.x); i < kMmaRows; i += kMmaThreads) {
      const int64_t query = first_query + i;
      const bool exists = query < sizes.sequence;
      const int64_t at = (b * sizes.sequence + query) * sizes.heads + head;
      log_sums[to * kMmaRows + i] = exists ? operands.lse[at] : 0.0F;
      out_dots[to * kMmaRows + i] = exists ? operands.out_dot[at] : 0.0F;
    }
  };
  start_copy<D>(rows + key_column, stride, first_key, sizes.sequence, k_tile);
  start_copy<D>(rows + value_column, stride, first_key, sizes.sequence, v_tile);
  start_piece(0, 0);
  end_group();

  MmaSums<D / 8> dk = {};
  MmaSums<D / 8> dv = {};
  int stage = 0;
  for (int64_t piece = 0; piece < pieces; ++piece, stage ^= 1) {
    if (piece + 1 < pieces) {
      start_piece(piece + 1, stage ^ 1);
      end_group();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const int head = head_of(piece);
    const int64_t first_query = query_of(piece);
    const bool masks = !sees_all(sizes, first_query, first_key);
    MmaSums<kMmaSums> scores;
    MmaSums<kMmaSums> dp;
    multiply_rows<D>(k_tile, warp * 16, q_tiles + stage * kElements, scores);
    multiply_rows<D>(v_tile, warp * 16, go_tiles + stage * kElements, dp);
#pragma unroll
    for (int n = 0; n < kMmaSums; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = n * 8 + 2 * t + e % 2;
        const auto gradient = differentiate_score(
            sizes, masks, seed, b, head, first_query + column,
            first_key + warp * 16 + g + e / 2 * 8, scores[n][e], dp[n][e],
            log_sums[stage * kMmaRows + column], out_dots[stage * kMmaRows + column]);
        scores[n][e] = gradient.kept;
        dp[n][e] = gradient.ds;
      }
    }
    add_weighted<D>(scores, go_tiles + stage * kElements, dv);
    add_weighted<D>(dp, q_tiles + stage * kElements, dk);
    __syncthreads();
  }

  const float scale = static_cast<float>(sizes.scale);
  Bf16* key_rows[2];
  Bf16* value_rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t key = first_key + warp * 16 + g + half * 8;
    Bf16* row = d_qkv + (b * sizes.sequence + key) * stride;
    key_rows[half] = key < sizes.sequence ? row + key_column : nullptr;
    value_rows[half] = key < sizes.sequence ? row + value_column : nullptr;
  }
  store_rows<D>(dk, {scale, scale}, key_rows);
  store_rows<D>(dv, {1.0F, 1.0F}, value_rows);
}

template <int D>
__global__ void __launch_bounds__(kMmaThreads)
    query_gradients_mma_kernel(GradientOperands<Bf16> operands, Bf16* d_qkv, AttentionSizes sizes) {
  constexpr int kElements = MmaTile<D>::kElements;
  extern __shared__ __align__(16) std::byte shared_memory[];
  auto* const q_tile = reinterpret_cast<Bf16*>(shared_memory);
  Bf16* const go_tile = q_tile + kElements;
  Bf16* const k_tiles = go_tile + kElements;  // two of each
  Bf16* const v_tiles = k_tiles + 2 * kElements;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * kMmaRows;
  const auto head = static_cast<int>(blockIdx.y);
  const int64_t b = blockIdx.z;
  const int group = head / (sizes.heads / sizes.groups);
  const int64_t stride = sizes.qkv_stride();
  const Bf16* rows = operands.qkv + b * sizes.sequence * stride;
  const Bf16* keys = rows + (sizes.heads + group) * D;
  const Bf16* values = rows + (sizes.heads + sizes.groups + group) * D;
  const uint64_t seed = sizes.drops ? sizes.dropout.step_seed(*sizes.step) : 0;

  const int64_t begin = sizes.first_key(first_query) / kMmaRows * kMmaRows;
  const int64_t end =
      first_query + kMmaRows < sizes.sequence ? first_query + kMmaRows : sizes.sequence;
  start_copy<D>(rows + head * D, stride, first_query, sizes.sequence, q_tile);
  start_copy<D>(operands.d_out + b * sizes.sequence * sizes.out_stride() + head * D,
                sizes.out_stride(), first_query, sizes.sequence, go_tile);
  start_copy<D>(keys, stride, begin, sizes.sequence, k_tiles);
  start_copy<D>(values, stride, begin, sizes.sequence, v_tiles);
  end_group();

  float log_sum[2];
  float out_dot[2];
  Bf16* targets[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t query = first_query + warp * 16 + g + half * 8;
    const bool exists = query < sizes.sequence;
    const int64_t token = b * sizes.sequence + query;
    log_sum[half] = exists ? operands.lse[token * sizes.heads + head] : 0.0F;
    out_dot[half] = exists ? operands.out_dot[token * sizes.heads + head] : 0.0F;
    targets[half] = exists ? d_qkv + token * stride + head * D : nullptr;
  }
  MmaSums<D / 8> dq = {};
  int stage = 0;
  for (int64_t first_key = begin; first_key < end; first_key += kMmaRows, stage ^= 1) {
    if (first_key + kMmaRows < end) {
      start_copy<D>(keys, stride, first_key + kMmaRows, sizes.sequence,
                    k_tiles + (stage ^ 1) * kElements);
      start_copy<D>(values, stride, first_key + kMmaRows, sizes.sequence,
                    v_tiles + (stage ^ 1) * kElements);
      end_group();
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const bool masks = !sees_all(sizes, first_query, first_key);
    MmaSums<kMmaSums> scores;
    MmaSums<kMmaSums> dp;
    multiply_rows<D>(q_tile, warp * 16, k_tiles + stage * kElements, scores);
    multiply_rows<D>(go_tile, warp * 16, v_tiles + stage * kElements, dp);
#pragma unroll
    for (int n = 0; n < kMmaSums; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[n][e] = differentiate_score(sizes, masks, seed, b, head,
                                       first_query + warp * 16 + g + e / 2 * 8,
                                       first_key + n * 8 + 2 * t + e % 2, scores[n][e], dp[n][e],
                                       log_sum[e / 2], out_dot[e / 2])
                       .ds;
      }
    }
    add_weighted<D>(dp, k_tiles + stage * kElements, dq);
    __syncthreads();
  }
  const float scale = static_cast<float>(sizes.scale);
  store_rows<D>(dq, {scale, scale}, targets);
}

template <int D>
struct AttentionMma {
  static size_t tile_bytes(int tiles) {
    return sizeof(Bf16) * static_cast<size_t>(tiles * MmaTile<D>::kElements);
  }
  static unsigned tiles(const AttentionAttributes& a) {
    return static_cast<unsigned>(ceil_divide(a.sequence, kMmaRows));
  }

  static void forward(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<AttentionAttributes>();
    const size_t bytes = tile_bytes(5);
    allow_shared_bytes(attention_mma_kernel<D>, bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch)),
            kMmaThreads, bytes},
           attention_mma_kernel<D>, args.in<Bf16>(0), args.out<Bf16>(0), args.out<float>(1),
           AttentionSizes(a, args.in<int64_t>(1)));
  }

  static void backward(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(a, args.in<int64_t>(4));
    const GradientOperands<Bf16> operands = gradient_operands<Bf16>(args);
    const size_t key_bytes = tile_bytes(6) + 4 * kMmaRows * sizeof(float);
    allow_shared_bytes(key_gradients_mma_kernel<D>, key_bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.groups), static_cast<unsigned>(a.batch)),
            kMmaThreads, key_bytes},
           key_gradients_mma_kernel<D>, operands, args.out<Bf16>(0), sizes);
    const size_t query_bytes = tile_bytes(6);
    allow_shared_bytes(query_gradients_mma_kernel<D>, query_bytes);
    launch(args,
           {dim3(tiles(a), static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch)),
            kMmaThreads, query_bytes},
           query_gradients_mma_kernel<D>, operands, args.out<Bf16>(0), sizes);
  }
};

}  // namespace
}  // namespace troupe
